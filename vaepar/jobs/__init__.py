"""Whole runs over many files: the only room where models, latents, media and ranks meet."""
