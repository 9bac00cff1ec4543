"""A custom training loop with DeepSpeed's ZeRO; Sentinel is attached by one call.

pip install deepspeed
torchrun --nproc-per-node 2 examples/deepspeed_loop.py
"""

from __future__ import annotations

import deepspeed
import torch
from torch import nn

from sentinel.hooks.deepspeed import attach

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
}


def main() -> None:
    torch.manual_seed(0)
    deepspeed.init_distributed()
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    inputs = torch.randn(2048, 16)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin().sum(1, keepdim=True))
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=data, config=CONFIG
    )
    with attach(engine):
        for _ in range(2):
            for x, y in loader:
                x, y = x.to(engine.device), y.to(engine.device)
                loss = nn.functional.mse_loss(engine(x), y)
                engine.backward(loss)
                engine.step()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
