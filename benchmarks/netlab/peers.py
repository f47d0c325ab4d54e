"""PyTorch's DistributedDataParallel with its communication hooks, on the same links.

A worker of `python -m benchmarks.allreduce --peers`, which runs it on every host with a Python that
has torch. The model and the batch are those of `methods.Step`. The row of a hook has ms, the step
less the same step without DDP, and step_ms.

PowerSGD has one bucket for all gradients: with DDP's own buckets it hangs on gloo. It compresses
every matrix, with error feedback and warm start, as of its third step.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from benchmarks.arguments import count
from benchmarks.netlab.worker import Case, measure

ROWS = 32
HOOKS = ("float32", "float16", "bfloat16", "powersgd1", "powersgd2", "powersgd4")
ONE_BUCKET = 1 << 14  # MiB


class Torch:
    """Processes joined by `torch.distributed` over gloo.

    Gloo binds the address that the host's own name resolves to, which is the one on its loopback.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank = int(os.environ["NETLAB_RANK"])
        address, _, port = os.environ["NETLAB_COORDINATOR"].rpartition(":")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=self.rank,
            world_size=int(os.environ["NETLAB_HOSTS"]),
        )
        self.world = dist.get_world_size()

    def barrier(self, name: str) -> None:
        import torch.distributed as dist

        del name
        dist.barrier()

    def gather(self, numbers: list[float]) -> Sequence[Sequence[float]]:
        import torch
        import torch.distributed as dist

        rows = [torch.zeros(len(numbers), dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(rows, torch.tensor(numbers, dtype=torch.float64))
        return [row.tolist() for row in rows]


class Step(Case):
    """A step of the perceptron under DDP with a hook, or without DDP for the compute alone."""

    def __init__(self, hook: str | None, shapes: Sequence[Sequence[int]], rank: int):
        import torch

        torch.manual_seed(0)
        layers: list[Any] = []
        for rows, columns in shapes:
            layers += [torch.nn.Linear(rows, columns, bias=False), torch.nn.ReLU()]
        self.model: Any = torch.nn.Sequential(*layers)
        if hook is not None:
            self.model = with_hook(self.model, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + rank)
        self.x, self.y = torch.randn(ROWS, shapes[0][0]), torch.randn(ROWS, shapes[-1][1])
        self.name = f"torch/{hook or 'compute'}"
        self.row = {"method": self.name, "codec": hook, "algorithm": "ddp", "peer": True}
        for _ in range(3):  # DDP forms its buckets after the first, PowerSGD begins in the third
            self.run()

    def run(self) -> None:
        """One step."""
        import torch

        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(self.x), self.y).backward()
        self.optimizer.step()


def with_hook(model: Any, hook: str) -> Any:
    """The model under DDP, whose gradients travel by a hook of HOOKS."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    if not hook.startswith("powersgd"):
        model = DistributedDataParallel(model)
        if hook != "float32":
            hooks = {"float16": default_hooks.fp16_compress_hook}
            hooks["bfloat16"] = default_hooks.bf16_compress_hook
            model.register_comm_hook(None, hooks[hook])
        return model
    model = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=int(hook.removeprefix("powersgd")),
        start_powerSGD_iter=2,
        min_compression_rate=0,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab.peers")
    parser.add_argument("--shapes", required=True, help="of the layers, such as 1024x1024,1024x10")
    parser.add_argument("--hooks", default=",".join(HOOKS))
    parser.add_argument("--repeats", type=count, default=5)
    args = parser.parse_args()
    together = Torch()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    cases = [Step(hook, shapes, together.rank) for hook in (None, *args.hooks.split(","))]
    measure(cases, together, args.repeats)
    together.barrier("the end")
    os._exit(0)  # threads of DDP's hooks are still there, and now and then abort a normal exit


if __name__ == "__main__":
    main()
