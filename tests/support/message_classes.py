"""Every class of message there is, found in the package."""

import importlib
import pkgutil
from dataclasses import is_dataclass

from ecckpt.protocol import messages


def message_classes():
    """Return the dataclasses of ``ecckpt.protocol.messages``, in order of their names."""
    names = [each.name for each in pkgutil.iter_modules(messages.__path__, messages.__name__ + ".")]
    modules = [importlib.import_module(name) for name in names]
    found = [
        each
        for module in modules
        for each in vars(module).values()
        if is_dataclass(each) and each.__module__ == module.__name__
    ]
    return sorted(found, key=lambda each: each.__name__)
