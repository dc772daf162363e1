"""GPUs that are not there: the names of ``torch.cuda`` that the state uses, and no more of them.

CPU tensors stand in for those on a GPU. What is queued on a stream happens when somebody waits for
it, and not before; a tensor that it needs and that is gone by then is an error.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from ecckpt.state.load import filling
from ecckpt.state.snapshot import parts, plan
from ecckpt.state.tensors import columns, devices

ALREADY_REGISTERED = 712


class Stream:
    def __init__(self, device):
        self.device, self._ops, self._done = device, [], 0
        self.waits = 0

    def queue(self, op):
        self._ops.append(op)

    @property
    def length(self):
        return len(self._ops)

    @property
    def pending(self):
        return self.length - self._done

    def run_to(self, mark):
        while self._done < mark:
            self._done += 1
            self._ops[self._done - 1]()

    def wait_stream(self, other):
        mark = other.length
        self.queue(lambda: other.run_to(mark))

    def synchronize(self):
        self.waits += 1
        self.run_to(self.length)


class Event:
    def __init__(self, *, blocking):
        assert blocking

    def record(self, stream):
        self._stream, self._mark = stream, stream.length

    def synchronize(self):
        self._stream.run_to(self._mark)


class _Queueing(TorchFunctionMode):
    """Inside ``with torch.cuda.stream(stream)``."""

    def __init__(self, gpus, stream):
        super().__init__()
        self._gpus, self._stream = gpus, stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and not self._gpus.at_work:
            return self._copy(*args, **kwargs)
        if func is torch.Tensor.new_ones and self._gpus.last_error:
            code, self._gpus.last_error = self._gpus.last_error, 0
            raise RuntimeError(f"CUDA error: {code}")
        made = func(*args, **kwargs)
        if func is torch.empty:
            made.view(-1).view(torch.uint8).fill_(0xEE)
            self._gpus.place(made, self._stream.device.index)
        return made

    def _copy(self, target, source, non_blocking=False):
        places = [self._gpus.gpu_of(tensor) for tensor in (target, source)]
        if places[0] != places[1]:
            assert non_blocking
            assert all(map(is_plain, (target, source))), "torch would make a temporary"
        assert set(places) <= {None, self._stream.device}
        references = weakref.ref(target), weakref.ref(source)

        def op():
            target, source = (reference() for reference in references)
            assert target is not None, "freed too early"
            assert source is not None, "freed too early"
            self._gpus.at_work = True
            with torch.no_grad():
                target.copy_(source)
            self._gpus.at_work = False

        self._stream.queue(op)
        return target


class Gpus:
    """Set ``refuses`` to have no memory registered, or none unregistered."""

    def __init__(self, monkeypatch):
        self.registered = {}
        self.calls = []
        self.last_error = 0
        self.at_work = False
        self.refuses = set()
        self._places, self._kept, self._streams, self._side = {}, [], {}, []
        for name in ("stream", "current_stream", "device", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self._make_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        for module in (devices, filling, plan):
            monkeypatch.setattr(module, "gpu_of", self.gpu_of)
        for module, name in ((columns, "_on_cpu"), (parts, "is_raw"), (filling, "is_raw")):
            really = getattr(module, name)
            monkeypatch.setattr(module, name, self._unless_placed(really))
        monkeypatch.setattr(devices, "_registered", {})
        devices._side_stream.cache_clear()

    def _unless_placed(self, really):
        return lambda tensor: self.gpu_of(tensor) is None and really(tensor)

    def place(self, tensor, index=0):
        """Have a CPU tensor, and all that share its memory, be on a GPU."""
        storage = tensor.untyped_storage()
        self._kept.append(storage)  # or the address would be another's soon
        self._places[storage.data_ptr()] = torch.device("cuda", index)
        return tensor

    def gpu_of(self, tensor):
        return self._places.get(tensor.untyped_storage().data_ptr())

    @property
    def pending(self):
        return sum(stream.pending for stream in self._side)

    # -- torch.cuda -------------------------------------------------------------------------------

    def _make_stream(self, *, device):
        self._side.append(Stream(device))
        return self._side[-1]

    def current_stream(self, device):
        return self._streams.setdefault(device, Stream(device))

    @contextmanager
    def stream(self, stream):
        with _Queueing(self, stream):
            yield

    @contextmanager
    def device(self, device):
        self.calls.append(f"device {device.index}")
        yield

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size_bytes, flags):  # noqa: N802
        assert is_mapped(address, size_bytes)
        assert flags == 0
        self.calls.append("register")
        if "register" in self.refuses:
            self.last_error = ALREADY_REGISTERED
            return ALREADY_REGISTERED
        self.registered[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append("unregister")
        if "unregister" in self.refuses:
            return ALREADY_REGISTERED
        assert is_mapped(address, self.registered.pop(address)), "unmapped before"
        return 0


def is_plain(tensor):
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def is_mapped(address, size_bytes):
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return any(int(a, 16) <= address and address + size_bytes <= int(b, 16) for a, b in spans)
