"""Sharded counterparts of the layers of diffusers' VAEs, and how they are installed in place."""
