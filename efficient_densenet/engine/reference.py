"""The shared stage in plain PyTorch, forward and backward: read this first. Tests compare every kernel set with it.

A stage is the layers of a dense block (batch norm, ReLU, 1×1 convolution, batch norm, ReLU, 3×3 convolution) and the
consumer of the block's output: a transition (batch norm, ReLU, 1×1 convolution, 2×2 average pooling) or the final norm.
Layers and consumer all read the same features X, (N, channels, height, width), each a prefix of the channels.

In a U-Net layers have the 3×3 convolution alone, the transition down has max pooling, and the consumer of the last
block is a classifier without a norm. A block on the way up reads what the one on the way down has stored (`skip`).

The engine computes the same without a tensor as large as X but X and G: its kernels hold relu(γ · x̂ + β), and the
gradient of it, for a tile at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight


class Layer(NamedTuple):
    """The parameters of a layer, or their gradients; a layer without a bottleneck has one norm and convolution."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    conv1_weight: Tensor
    norm2_weight: Any = None
    norm2_bias: Any = None
    conv2_weight: Any = None


class Consumer(NamedTuple):
    """The parameters of a transition, or their gradients; the final norm has no convolution, a classifier no norm."""

    norm_weight: Any = None
    norm_bias: Any = None
    conv_weight: Any = None
    max_pools: bool = False


class Saved(NamedTuple):
    """All that is kept for the backward: the features, their statistics, (channels,), and which values max pooling has
    taken."""

    features: Tensor
    mean: Tensor
    inv_std: Tensor
    codes: Any = None


def forward(
    x: Tensor, layers: Sequence[Layer], consumer: Consumer, eps: float = 1e-5, skip: Saved | None = None
) -> tuple[Tensor, Saved]:
    """The consumer's output. Nothing is concatenated, and each channel's statistics are computed once (facts 1, 2)."""
    growth_rate = _last(layers[0]).shape[0]
    total = x.shape[1] + (0 if skip is None else len(skip.mean)) + growth_rate * len(layers)
    features = x.new_empty(x.shape[0], total, *x.shape[2:])
    mean, inv_std, codes = x.new_empty(total), x.new_empty(total), None

    def write(new: Tensor, start: int, statistics: tuple[Tensor, Tensor] | None = None) -> int:
        stop = start + new.shape[1]
        features[:, start:stop] = new
        mean[start:stop], inv_std[start:stop] = statistics or _statistics(new, eps)
        return stop

    channels = write(x, 0)
    if skip is not None:  # the engine's block on the way up writes beside the skipped channels, and copies none
        channels = write(skip.features, channels, (skip.mean, skip.inv_std))
    for layer in layers:
        x_hat = _normalized(features[:, :channels], mean[:channels], inv_std[:channels])
        z = _affine(x_hat, layer.norm1_weight, layer.norm1_bias).relu()
        if layer.conv2_weight is not None:
            bottleneck = F.conv2d(z, layer.conv1_weight)
            z_hat = _normalized(bottleneck, *_statistics(bottleneck, eps))
            z = _affine(z_hat, layer.norm2_weight, layer.norm2_bias).relu()
        channels = write(F.conv2d(z, _last(layer), padding=1), channels)
    output = features
    if consumer.norm_weight is not None:
        output = _affine(_normalized(features, mean, inv_std), consumer.norm_weight, consumer.norm_bias)
    if consumer.max_pools:
        output, codes = F.max_pool2d(F.conv2d(output.relu(), consumer.conv_weight), 2, return_indices=True)
    elif consumer.norm_weight is None:
        output = F.conv2d(output, consumer.conv_weight)
    elif consumer.conv_weight is not None:  # average pooling commutes with a 1×1 convolution, and leaves it less to do
        output = F.conv2d(F.avg_pool2d(output.relu(), 2), consumer.conv_weight)
    return output, Saved(features, mean, inv_std, codes)


def backward(
    grad_output: Tensor,
    saved: Saved,
    layers: Sequence[Layer],
    consumer: Consumer,
    eps: float = 1e-5,
    grad_features: Tensor | None = None,
) -> tuple[Tensor, list[Layer], Consumer]:
    """The gradients of x (and what was skipped), of the layers' parameters and of the consumer's.

    `grad_accum`, G, is the gradient of x̂, the normalized features: the sum of γ · g over the consumers, g being the
    gradient of each norm's output. When a channel's last consumer is done, its G becomes the gradient of the channel
    itself (fact 4), to which `grad_features`, D, is added: the gradient of the features without a norm, as of what a
    block on the way up has read. The bottleneck is computed again (fact 3).
    """
    x_hat, grads = _normalized(*saved[:3]), []
    grad_features = torch.zeros_like(x_hat) if grad_features is None else grad_features
    if consumer.norm_weight is None:
        grad_consumer = Consumer(None, None, conv2d_weight(saved.features, consumer.conv_weight.shape, grad_output))
        grad_features, grad_accum = F.conv_transpose2d(grad_output, consumer.conv_weight), torch.zeros_like(x_hat)
    else:
        grad_norm, grad_conv = _consumer_backward(grad_output, x_hat, saved, consumer)
        grad_consumer = Consumer(_sum(grad_norm * x_hat), _sum(grad_norm), grad_conv)
        grad_accum = _by_channel(consumer.norm_weight) * grad_norm

    channels = x_hat.shape[1]
    for layer in reversed(layers):
        stop, channels = channels, channels - _last(layer).shape[0]
        new, read = slice(channels, stop), slice(0, channels)
        grad_new = _batch_norm_backward(grad_accum[:, new], x_hat[:, new], saved.inv_std[new]) + grad_features[:, new]

        y = _affine(x_hat[:, read], layer.norm1_weight, layer.norm1_bias).relu()
        if layer.conv2_weight is None:
            grad_conv1, others = conv2d_weight(y, layer.conv1_weight.shape, grad_new, padding=1), ()
            grad_norm1 = conv2d_input(y.shape, layer.conv1_weight, grad_new, padding=1) * (y > 0)
        else:
            bottleneck = F.conv2d(y, layer.conv1_weight)
            mean, inv_std = _statistics(bottleneck, eps)
            z_hat = _normalized(bottleneck, mean, inv_std)
            z = _affine(z_hat, layer.norm2_weight, layer.norm2_bias).relu()

            grad_conv2 = conv2d_weight(z, layer.conv2_weight.shape, grad_new, padding=1)
            grad_norm2 = conv2d_input(z.shape, layer.conv2_weight, grad_new, padding=1) * (z > 0)
            grad_bottleneck = _batch_norm_backward(_by_channel(layer.norm2_weight) * grad_norm2, z_hat, inv_std)
            grad_conv1 = conv2d_weight(y, layer.conv1_weight.shape, grad_bottleneck)
            grad_norm1 = conv2d_input(y.shape, layer.conv1_weight, grad_bottleneck) * (y > 0)
            others = _sum(grad_norm2 * z_hat), _sum(grad_norm2), grad_conv2
        grad_accum[:, read] += _by_channel(layer.norm1_weight) * grad_norm1
        grads.append(Layer(_sum(grad_norm1 * x_hat[:, read]), _sum(grad_norm1), grad_conv1, *others))
    first = slice(0, channels)
    grad_input = _batch_norm_backward(grad_accum[:, first], x_hat[:, first], saved.inv_std[first])
    return grad_input + grad_features[:, first], grads[::-1], grad_consumer


def _consumer_backward(
    grad_output: Tensor, x_hat: Tensor, saved: Saved, consumer: Consumer
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the norm's output and of the convolution's weight."""
    if consumer.conv_weight is None:
        return grad_output, None
    y = _affine(x_hat, consumer.norm_weight, consumer.norm_bias).relu()
    if consumer.max_pools:
        grad = F.max_unpool2d(grad_output, saved.codes, (2, 2), output_size=y.shape[2:])
        grad_conv = conv2d_weight(y, consumer.conv_weight.shape, grad)
        return F.conv_transpose2d(grad, consumer.conv_weight) * (y > 0), grad_conv
    grad_conv = conv2d_weight(F.avg_pool2d(y, 2), consumer.conv_weight.shape, grad_output)
    grad = F.conv_transpose2d(grad_output, consumer.conv_weight)
    grad = torch.ops.aten.avg_pool2d_backward(grad, y, [2, 2], [2, 2], [0, 0], False, True, None)
    return grad * (y > 0), grad_conv


def _last(layer: Layer) -> Tensor:
    """The weight of the layer's 3×3 convolution."""
    return layer.conv1_weight if layer.conv2_weight is None else layer.conv2_weight


def _statistics(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The batch mean of each channel, and 1 / sqrt(var + eps)."""
    variance, mean = torch.var_mean(values, (0, 2, 3), correction=0)
    return mean, torch.rsqrt(variance + eps)


def _normalized(values: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
    return (values - _by_channel(mean)) * _by_channel(inv_std)


def _affine(x_hat: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return _by_channel(weight) * x_hat + _by_channel(bias)


def _batch_norm_backward(grad: Tensor, x_hat: Tensor, inv_std: Tensor) -> Tensor:
    """The gradient of the values whose normalized values x̂ have the gradient `grad`."""
    count = grad.numel() // grad.shape[1]
    mean, mean_of_products = (_by_channel(_sum(each) / count) for each in (grad, grad * x_hat))
    return _by_channel(inv_std) * (grad - mean - x_hat * mean_of_products)


def _sum(values: Tensor) -> Tensor:
    return values.sum((0, 2, 3))


def _by_channel(vector: Tensor) -> Tensor:
    return vector.view(-1, 1, 1)
