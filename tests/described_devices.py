"""Devices as their drivers describe them, for tests of what each would get without the hardware."""

from __future__ import annotations

import dataclasses

from fastft.capability import DeviceFacts, SoftwareFacts, assess

GIB = 1024**3
INSTALLED = SoftwareFacts(torch_version="2.13.0", triton_version="3.9.0")
INTERPRETED = dataclasses.replace(INSTALLED, triton_interpreter=True)

H100 = DeviceFacts("cuda", name="H100 80GB", arch=(9, 0), sm_count=132, total_memory=80 * GIB)
DEVICES = {
    "T4": DeviceFacts("cuda", name="T4", arch=(7, 5), sm_count=40, total_memory=15 * GIB),
    "RTX 2080": DeviceFacts("cuda", name="RTX 2080", arch=(7, 5), sm_count=46, total_memory=8 * GIB),
    "A100": DeviceFacts("cuda", name="A100", arch=(8, 0), sm_count=108, total_memory=40 * GIB),
    "RTX 4090 laptop": DeviceFacts("cuda", name="RTX 4090 Laptop", arch=(8, 9), sm_count=76, total_memory=16 * GIB),
    "H100": H100,
    "H100 MIG slice": dataclasses.replace(H100, name="H100 80GB MIG 1g.10gb", sm_count=16, total_memory=10 * GIB),
    "H200": DeviceFacts("cuda", name="H200", arch=(9, 0), sm_count=132, total_memory=141 * GIB),
    "B200": DeviceFacts("cuda", name="B200", arch=(10, 0), sm_count=148, total_memory=180 * GIB),
    "DGX Spark": DeviceFacts("cuda", name="GB10", arch=(12, 1), sm_count=48, unified_memory=True),
    "MI300": DeviceFacts("hip", name="MI300X", gcn_arch="gfx942", sm_count=304, warp_size=64),
    "GTX 1070": DeviceFacts("cuda", name="GTX 1070", arch=(6, 1), sm_count=15, total_memory=8 * GIB),
    "CPU": DeviceFacts("cpu"),
}
DESCRIBED = {
    **{name: assess(facts, INSTALLED) for name, facts in DEVICES.items()},
    "CPU interpreted": assess(DEVICES["CPU"], INTERPRETED),
}
