"""The commands of vaepar, installed as ``vaepar.cli``: flags to one frozen request, one call into the jobs."""
