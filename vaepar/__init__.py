"""vaepar: decode (and encode) with the VAEs of diffusers across ranks, with the pixels of one device.

Importing this package loads neither torch nor diffusers; the model classes live in ``vaepar.autoencoders``.
"""

from vaepar.config import VaeParallelConfig, VaeParallelMode
from vaepar.errors import VaeparError

__version__ = "0.1.0"
__all__ = ["VaeParallelConfig", "VaeParallelMode", "VaeparError", "__version__"]
