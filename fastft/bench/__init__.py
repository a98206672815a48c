"""Measurements that a user can make of a model of their own: `fastft bench`."""
