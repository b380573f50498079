"""Train the experiments' networks on a GPU: accuracies and times, as JSON.

    OUT=folder python -m benchmarks.training DATA [--paper-resnet] [--seed 0] [--only RUN ...]

DATA holds mnist.npz and cifar10.npz with uint8 x_train, y_train, x_test, y_test.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import rgpr
from rgpr._atomic import replacing
from rgpr_paper.training import RunOptions, TrainingPlan, lenet, resnet18, train


def read(path: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    with np.load(path) as file:
        pairs = []
        for part in ("train", "test"):
            x = torch.from_numpy(np.ascontiguousarray(file[f"x_{part}"]))
            x = x[:, None] if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
            pairs.append((x, torch.from_numpy(file[f"y_{part}"].reshape(-1).astype(np.int64))))
    return pairs[0], pairs[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--paper-resnet", action="store_true", help="paper_sgd, 100 epochs, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, help="fewer, for a trial")
    parser.add_argument("--only", nargs="*", help="names of runs, e.g. lenet-mnist-fast")
    parser.add_argument("--save-weights", action="store_true", help="also $OUT/NAME.safetensors")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    shorter = {} if options.epochs is None else {"epochs": options.epochs}

    runs = {
        # Mirrored digits are other digits, so no flips on MNIST.
        "lenet-mnist-paper_adam": ("mnist", lenet, TrainingPlan.paper_adam(**shorter)),
        "lenet-mnist-fast": ("mnist", lenet, TrainingPlan.fast(augment="crop", **shorter)),
        "lenet-mnist-fast-no-augment": (
            "mnist",
            lenet,
            TrainingPlan.fast(augment="none", **shorter),
        ),
        "resnet18-cifar10-fast": ("cifar10", resnet18, TrainingPlan.fast(**shorter)),
    }
    if options.paper_resnet:
        runs["resnet18-cifar10-paper_sgd"] = (
            "cifar10",
            resnet18,
            TrainingPlan.paper_sgd(**shorter),
        )
    if options.only:
        runs = {name: runs[name] for name in options.only}

    cuda = torch.device(options.device).type == "cuda"
    results: dict[str, object] = {
        "torch": torch.__version__,
        "rgpr": getattr(rgpr, "__version__", "?"),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "seed": options.seed,
        "runs": {},
    }
    data = {name: read(options.data / f"{name}.npz") for name in {run[0] for run in runs.values()}}
    for name, (which, build, plan) in runs.items():
        training, test = data[which]
        torch.manual_seed(options.seed)
        network = build()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        history = train(
            network,
            training,
            plan,
            RunOptions(
                seed=options.seed,
                device=options.device,
                checkpoint=out / f".{name}.checkpoint",
            ),
            validation=test,
        )
        total = time.perf_counter() - started
        results["runs"][name] = {
            "test accuracy": history.validation[-1],
            "train accuracy": history.accuracies[-1],
            "train loss": history.losses[-1],
            "epochs": history.epochs,
            "seconds in all": total,
            "seconds per epoch, median": float(np.median(history.seconds)),
            "seconds of the first epoch": history.seconds[0],
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "test accuracy by epoch": history.validation,
            "loss by epoch": history.losses,
        }
        if options.save_weights:
            weights = {k: t.detach().cpu().contiguous() for k, t in network.state_dict().items()}
            save_file(weights, out / f"{name}.safetensors")
        (out / f".{name}.checkpoint").unlink(missing_ok=True)
        with replacing(out / "training.json") as temporary:
            temporary.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{name}: {history.validation[-1]:.2%} in {total:.0f} s", flush=True)


if __name__ == "__main__":
    main()
