"""What a machine lacks becomes one line: shared memory or descriptors for the loader's processes."""

import gc

import pytest
import torch

from common.errors import UserError
from dataset.order import ProcessLoader
from trainer.devices.errors import translated_failures


@pytest.fixture
def soon_ended(monkeypatch):
    """Loader processes that are left behind are ended here, and not after torch's five seconds."""
    for module in (torch.utils.data._utils, torch.utils.data._utils.worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


class SmallMemory(torch.utils.data.Dataset):
    """Fails in a loader process as torch does when /dev/shm is full."""

    def __init__(self, text: str):
        self.text = text

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int):
        raise RuntimeError(self.text)


def test_a_batch_that_does_not_fit_into_shared_memory_is_one_line(soon_ended):
    text = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    with pytest.raises(UserError, match="--num_workers 0"), translated_failures():
        list(torch.utils.data.DataLoader(SmallMemory(text), num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(RuntimeError, match="a bug"), translated_failures():
        list(torch.utils.data.DataLoader(SmallMemory("a bug"), num_workers=1, multiprocessing_context="fork"))


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_loader_process_that_died_while_it_handed_over_is_one_line(error):
    class Dying(list):
        def __iter__(self):
            yield [0]
            raise error

    with pytest.raises(UserError, match=f"{error.__name__}.*--num_workers 0"), translated_failures():
        list(ProcessLoader([torch.zeros(1)], batch_sampler=Dying()))
