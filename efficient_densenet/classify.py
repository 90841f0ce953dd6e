"""Images and their likeliest classes, by a trained model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._images import open_image
from .models.densenet import DenseNet
from .models.zoo import create_model
from .weights.config import ModelConfig
from .weights.load import load_weights
from .weights.named import weights_classes, weights_transforms
from .weights.published import PUBLISHED
from .weights.trained import TRAINED

if TYPE_CHECKING:
    from PIL.Image import Image

HEAT: dict[str, Any] = {"black": "#440154", "mid": "#21918c", "white": "#fde725"}
"""The colors of a heat map from its least to its largest value, which differ in lightness too."""


class Prediction(NamedTuple):
    """The likeliest classes of an image with their probabilities; the model's input, and its last feature map."""

    path: Path
    likeliest: tuple[tuple[str, float], ...]
    input: Tensor
    heat: Tensor
    """The class activation map of the likeliest class (Zhou et al., https://arxiv.org/abs/1512.04150), at least 0: for
    a DenseNet the same as Grad-CAM's, up to a factor."""

    def __str__(self) -> str:
        classes = ", ".join(f"{name} ({probability:.1%})" for name, probability in self.likeliest)
        return f"{self.path}: {classes}"

    def overlay(self) -> "Image":
        """The model's input, colored by the heat map."""
        from PIL import Image, ImageOps

        def to_gray(values: Tensor) -> Image.Image:
            values = (values - values.amin()) / (values.amax() - values.amin()).clamp(min=1e-12)
            return Image.fromarray((255 * values).byte().cpu().numpy())

        heat = F.interpolate(self.heat[None, None], self.input.shape[-2:], mode="bicubic")[0, 0]
        shown = to_gray(self.input.float().mean(0)).convert("RGB")
        return Image.blend(shown, ImageOps.colorize(to_gray(heat.clamp(min=0)), **HEAT), 0.5)


@dataclass(frozen=True)
class Classifier:
    """A model, the preparation of its images, and the names of its classes."""

    model: DenseNet
    prepare: Callable[[Any], Tensor]
    classes: tuple[str, ...]

    @torch.no_grad()
    def __call__(self, path: Path, top: int = 1) -> Prediction:
        """The `top` likeliest classes of the image in a file."""
        device = next(self.model.parameters()).device
        x = self.prepare(open_image(path, self.model.in_channels)).to(device)
        features = self.model.forward_features(x[None])
        probabilities = self.model.forward_head(features).softmax(1)[0]
        if not probabilities.isfinite().all():
            raise FloatingPointError(
                f"{path}: the model's outputs are not finite, so its weights are damaged: restore them from a copy"
            )
        found = probabilities.argsort(descending=True)[:top].tolist()
        heat = torch.einsum("c,chw->hw", self.model.get_parameter("classifier.weight")[found[0]], features[0]).relu()
        return Prediction(path, tuple((self.classes[i], float(probabilities[i])) for i in found), x, heat)


def load_classifier(source: str) -> Classifier:
    """The classifier of torchvision's weights by the name of their model, of weights of this package by their name, or
    of a folder with model.pt and config.json, as training by the demos writes it."""
    if source in PUBLISHED or source in TRAINED:
        name, weights = (source, "DEFAULT") if source in PUBLISHED else (TRAINED[source].model, source)
        model = create_model(name, weights=weights)
        return Classifier(model.eval(), weights_transforms(name, weights), weights_classes(name, weights))
    weights = Path(source, "model.pt") if Path(source).is_dir() else Path(source)
    if not weights.is_file():
        raise ValueError(
            f"{weights} does not exist: give a folder with model.pt and config.json, as training by the demos writes "
            f"it, or the name of weights: {', '.join((*PUBLISHED, *TRAINED))}"
        )
    config = ModelConfig.beside(weights)
    model = config.build()
    load_weights(model, weights)
    return Classifier(model.eval(), config.transforms(), config.classes)
