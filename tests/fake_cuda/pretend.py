"""What torch and the trainer ask about CUDA is answered here, by the import of this file; before the model's,
which decorates its decoder with torch's inference mode."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda *_: True
torch.cuda.current_device = lambda: 0
torch.cuda._exchange_device = lambda _: 0
torch.cuda._maybe_exchange_device = lambda _: 0  # another one, as the compiler knows it by its function
torch.cuda._lazy_init = lambda: None
torch.cuda.manual_seed_all = torch.cuda.set_rng_state = lambda *_: None
torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
torch.cuda.amp.common.amp_definitely_not_available = lambda: False
FakeTensorMode.avoid_device_init = property(lambda _: True)
torch.inference_mode = lambda *_: torch.no_grad()  # there operators come one by one
# the stand-in knows the first GPU only
Tensor.new_tensor = lambda like, data: torch.tensor(data, dtype=like.dtype, device=like.device)
