"""Where the scores of pictures come from, by Grad-CAM."""

from pathlib import Path
from typing import Any

import pictures
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from tqdm import tqdm


def draw(model: nn.Module, scores: Tensor, data: Any, labels: list[str], name: str, out: Path) -> None:
    """For each label the four pictures with the highest score, and by Grad-CAM what the score comes from."""
    if (side := data.options.image_size // 32) < 5:
        print(f"no Grad-CAM: at --image_size {data.options.image_size} the last features are {side} × {side}, too few "
              "to tell where; from 160 on it is drawn")  # fmt: skip
        return
    out.mkdir(exist_ok=True)
    with GradCAM(model, [model.get_submodule("features.norm5")]) as cam:
        for i, label in enumerate(tqdm(labels, "Grad-CAM", leave=False)):
            top = scores[:, i].nan_to_num(-1).topk(min(4, int(scores[:, i].isfinite().sum()))).indices.tolist()
            images = torch.stack([data[j][0] for j in top])
            maps = cam(images, [ClassifierOutputTarget(i)] * len(top))
            figure, axes = pictures.grid(f"Grad-CAM of {label.replace('_', ' ')}, {name}", 2 * len(top), len(top))
            for k, j in enumerate(top):
                truth = {1.0: "present", 0.0: "absent"}.get(data.targets[j, i].item(), "not known")
                pictures.show(axes[k], images[k, 0].numpy(), f"score {scores[j, i]:.2f}, {truth}")
                pictures.show(axes[len(top) + k], images[k, 0].numpy(), heat=maps[k])
            figure.savefig(out / f"{label.replace(' ', '_')}.png")
