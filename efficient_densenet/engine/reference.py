"""The shared stage in plain PyTorch, forward and backward: read this first. Tests compare every kernel set with it.

A stage is the layers of a dense block (batch norm, ReLU, 1×1 convolution, batch norm, ReLU, 3×3 convolution) and the
consumer of the block's output: a transition (batch norm, ReLU, 1×1 convolution, 2×2 average pooling) or the final norm.
Layers and consumer all read the same features X, (N, channels, height, width), each a prefix of the channels.

The engine computes the same without a tensor as large as X but X and G: its kernels hold relu(γ · x̂ + β), and the
gradient of it, for a tile at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight


class Layer(NamedTuple):
    """The parameters of a layer, or their gradients."""

    norm1_weight: Tensor
    norm1_bias: Tensor
    conv1_weight: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    conv2_weight: Tensor


class Consumer(NamedTuple):
    """The parameters of a transition, or their gradients; the final norm has no convolution."""

    norm_weight: Tensor
    norm_bias: Tensor
    conv_weight: Tensor | None = None


class Saved(NamedTuple):
    """All that is kept for the backward: the features and their statistics, (channels,)."""

    features: Tensor
    mean: Tensor
    inv_std: Tensor


def forward(x: Tensor, layers: Sequence[Layer], consumer: Consumer, eps: float = 1e-5) -> tuple[Tensor, Saved]:
    """The consumer's output. Nothing is concatenated, and each channel's statistics are computed once (facts 1, 2)."""
    growth_rate = layers[0].conv2_weight.shape[0]
    total = x.shape[1] + growth_rate * len(layers)
    features = x.new_empty(x.shape[0], total, *x.shape[2:])
    mean, inv_std = x.new_empty(total), x.new_empty(total)

    def write(new: Tensor, start: int) -> int:
        stop = start + new.shape[1]
        features[:, start:stop] = new
        mean[start:stop], inv_std[start:stop] = _statistics(new, eps)
        return stop

    channels = write(x, 0)
    for layer in layers:
        x_hat = _normalized(features[:, :channels], mean[:channels], inv_std[:channels])
        bottleneck = F.conv2d(_affine(x_hat, layer.norm1_weight, layer.norm1_bias).relu(), layer.conv1_weight)
        z_hat = _normalized(bottleneck, *_statistics(bottleneck, eps))
        z = _affine(z_hat, layer.norm2_weight, layer.norm2_bias).relu()
        channels = write(F.conv2d(z, layer.conv2_weight, padding=1), channels)
    output = _affine(_normalized(features, mean, inv_std), consumer.norm_weight, consumer.norm_bias)
    if consumer.conv_weight is not None:  # average pooling commutes with a 1×1 convolution, and leaves it less to do
        output = F.conv2d(F.avg_pool2d(output.relu(), 2), consumer.conv_weight)
    return output, Saved(features, mean, inv_std)


def backward(
    grad_output: Tensor, saved: Saved, layers: Sequence[Layer], consumer: Consumer, eps: float = 1e-5
) -> tuple[Tensor, list[Layer], Consumer]:
    """The gradients of x, of the layers' parameters and of the consumer's.

    `grad_accum`, G, is the gradient of x̂, the normalized features: the sum of γ · g over the consumers, g being the
    gradient of each norm's output. When a channel's last consumer is done, its G becomes the gradient of the channel
    itself (fact 4). The bottleneck is computed again (fact 3).
    """
    x_hat, grads = _normalized(*saved), []
    grad_norm, grad_conv = grad_output, None
    if consumer.conv_weight is not None:
        y = _affine(x_hat, consumer.norm_weight, consumer.norm_bias).relu()
        grad_conv = conv2d_weight(F.avg_pool2d(y, 2), consumer.conv_weight.shape, grad_output)
        grad_pooled = F.conv_transpose2d(grad_output, consumer.conv_weight)
        grad_norm = torch.ops.aten.avg_pool2d_backward(grad_pooled, y, [2, 2], [2, 2], [0, 0], False, True, None)
        grad_norm = grad_norm * (y > 0)
    grad_consumer = Consumer(_sum(grad_norm * x_hat), _sum(grad_norm), grad_conv)
    grad_accum = _by_channel(consumer.norm_weight) * grad_norm

    channels = x_hat.shape[1]
    for layer in reversed(layers):
        stop, channels = channels, channels - layer.conv2_weight.shape[0]
        new, read = slice(channels, stop), slice(0, channels)
        grad_new = _batch_norm_backward(grad_accum[:, new], x_hat[:, new], saved.inv_std[new])

        y = _affine(x_hat[:, read], layer.norm1_weight, layer.norm1_bias).relu()
        bottleneck = F.conv2d(y, layer.conv1_weight)
        mean, inv_std = _statistics(bottleneck, eps)
        z_hat = _normalized(bottleneck, mean, inv_std)
        z = _affine(z_hat, layer.norm2_weight, layer.norm2_bias).relu()

        grad_conv2 = conv2d_weight(z, layer.conv2_weight.shape, grad_new, padding=1)
        grad_norm2 = conv2d_input(z.shape, layer.conv2_weight, grad_new, padding=1) * (z > 0)
        grad_bottleneck = _batch_norm_backward(_by_channel(layer.norm2_weight) * grad_norm2, z_hat, inv_std)
        grad_conv1 = conv2d_weight(y, layer.conv1_weight.shape, grad_bottleneck)
        grad_norm1 = conv2d_input(y.shape, layer.conv1_weight, grad_bottleneck) * (y > 0)
        grad_accum[:, read] += _by_channel(layer.norm1_weight) * grad_norm1
        norm1 = _sum(grad_norm1 * x_hat[:, read]), _sum(grad_norm1)
        norm2 = _sum(grad_norm2 * z_hat), _sum(grad_norm2)
        grads.append(Layer(*norm1, grad_conv1, *norm2, grad_conv2))
    first = slice(0, channels)
    grad_input = _batch_norm_backward(grad_accum[:, first], x_hat[:, first], saved.inv_std[first])
    return grad_input, grads[::-1], grad_consumer


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
