"""What a distributed VAE is called in the files that it is saved to: its diffusers class, which everybody can load."""

from __future__ import annotations

from typing import Any, ClassVar

from vaepar.autoencoders.capability import VaeCapability


class SavedAsDiffusers:
    """Lets ``save_pretrained`` of a model, and of a pipeline that holds it, write the diffusers class.

    diffusers writes ``__class__.__name__`` into config.json, and that with the first part of the instance's
    ``__module__`` into model_index.json; a name of ours there could only be loaded where vaepar is installed. So a
    family's class takes the name of its diffusers class, and its instances that class's module. The class's own
    module and ``__qualname__`` stay: by them it is pickled and shown.
    """

    capability: ClassVar[VaeCapability]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "capability" in vars(cls):
            cls.__name__ = cls.capability.base_class

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__new__(cls)
        take_module(model)
        return model


def take_module(model: Any) -> None:
    """Give an instance of a family's class the module of its diffusers class."""
    base = next(c for c in type(model).__mro__ if c.__module__.startswith("diffusers."))
    vars(model)["__module__"] = base.__module__
