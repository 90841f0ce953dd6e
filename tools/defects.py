"""Defects that the tests must catch: each is a small edit of the package, applied by `plant_defects.py`."""

from typing import NamedTuple


class Defect(NamedTuple):
    """`old` occurs exactly once in `file`, a path in the package; `tests` are the test files to try first."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SHARED = "engines/shared/"
STATISTICS = SHARED + "statistics.py"
BATCH_NORM = SHARED + "batch_norm.py"
BACKWARD = SHARED + "backward.py"
PORTABLE = "engines/kernels/portable.py"
NUMBA = "engines/kernels/numba_cpu/"
TRITON = "engines/kernels/triton_gpu/"
CHECKPOINT = ("checkpoint", "checkpoint_state", "checkpoint_gradients", "checkpoint_contexts", "engines")
STAGE_TESTS = ("shared_matrix", "shared", "shared_autograd")

DEFECTS = [
    # The shared engine
    Defect(
        "batch norm backward without the mean term",
        BATCH_NORM,
        "inv_std * per_value, grad_sum * per_value",
        "inv_std * per_value, 0 * grad_sum",
        STAGE_TESTS,
    ),
    Defect(
        "batch norm backward without the product term",
        BATCH_NORM,
        "slope, constant = grad_normalized_sum * inv_std",
        "slope, constant = 0 * grad_normalized_sum * inv_std",
        STAGE_TESTS,
    ),
    Defect(
        "momentum the wrong way round",
        BATCH_NORM,
        "running.lerp_(batch, momentum)",
        "running.lerp_(batch, 1 - momentum)",
        STAGE_TESTS,
    ),
    Defect(
        "cumulative average starts a batch late",
        BATCH_NORM,
        "1 / float(norm.num_batches_tracked) if",
        "1 / (1 + float(norm.num_batches_tracked)) if",
        ("shared_matrix", "batchnorm"),
    ),
    Defect("running variance biased", BATCH_NORM, "(count / (count - 1))", "1", STAGE_TESTS),
    Defect(
        "eps outside the square root",
        STATISTICS,
        "variance.add_(self.eps).rsqrt_()",
        "variance.rsqrt_().add_(-self.eps)",
        STAGE_TESTS,
    ),
    Defect(
        "frozen norm scales its gradient like one with batch statistics",
        BATCH_NORM,
        "return self.scale if frozen else self.weight",
        "return self.weight",
        STAGE_TESTS,
    ),
    Defect(
        "frozen norm's mean term left in the gradient of its weight",
        BATCH_NORM,
        "grad_values_sum - self.mean * grad_sum",
        "grad_values_sum",
        STAGE_TESTS,
    ),
    Defect(
        "running statistics updated twice under torch's checkpoint",
        BATCH_NORM,
        "if not norm.track_running_stats or in_backward():",
        "if not norm.track_running_stats:",
        ("shared", "shared_autograd", "batchnorm"),
    ),
    Defect(
        "running statistics of the first layer's channels for every norm",
        STATISTICS,
        "update_running_statistics(norm, self.mean[columns], self.unbiased_variances[columns])",
        "update_running_statistics(norm, self.mean[columns].roll(1), self.unbiased_variances[columns])",
        STAGE_TESTS,
    ),
    Defect(
        "one channel missing in the gradient of the statistics",
        STATISTICS,
        "self.grad_normalized_sum[columns].addcmul_(norm.weight, norm.grad_weight)",
        "self.grad_normalized_sum[columns][1:].addcmul_(norm.weight[1:], norm.grad_weight[1:])",
        STAGE_TESTS,
    ),
    Defect(
        "newest_first ignored",
        STATISTICS,
        "return slice(self.total - stop, self.total - start)",
        "return slice(start, stop)",
        ("parts",),
    ),
    Defect(
        "columns of new features not shifted by those of the input",
        STATISTICS,
        "slice(start - self.first, stop - self.first)",
        "slice(start, stop)",
        ("new_features_only",),
    ),
    Defect(
        "bias missing in a block's own output",
        SHARED + "forward.py",
        "output = values if bias is None else values + bias",
        "output = values",
        ("conv_biases", "new_features_only"),
    ),
    Defect(
        "dropout mask not scaled in the backward",
        BACKWARD,
        ".div_(1 - layer.drop_rate or 1)",
        "",
        STAGE_TESTS,
    ),
    Defect(
        "conv2's gradient lost",
        BACKWARD,
        "norm.grad_weight, norm.grad_bias, grad_weight",
        "norm.grad_weight, norm.grad_bias, None",
        STAGE_TESTS,
    ),
    Defect(
        "gradients of a norm's weight and bias swapped",
        BACKWARD,
        "grads = [norm.grad_weight, norm.grad_bias, grad_conv]",
        "grads = [norm.grad_bias, norm.grad_weight, grad_conv]",
        STAGE_TESTS,
    ),
    Defect(
        "bias before a frozen bottleneck norm not subtracted from its mean",
        SHARED + "forward.py",
        "mean = mean if bias is None else mean - bias",
        "pass",
        ("conv_biases",),
    ),
    Defect(
        "bias of a bottleneck missing in the running mean",
        SHARED + "forward.py",
        "biased_mean = mean if bias is None else mean + bias",
        "biased_mean = mean",
        ("conv_biases",),
    ),
    Defect(
        "bias of new channels missing in the running mean",
        STATISTICS,
        "self.mean[columns] = mean if bias is None else mean + bias",
        "self.mean[columns] = mean",
        ("conv_biases",),
    ),
    Defect(
        "gradient of a bias before a frozen bottleneck norm lost",
        BATCH_NORM,
        "return self.scale * self.grad_bias if frozen else",
        "return 0 * self.grad_bias if frozen else",
        ("conv_biases",),
    ),
    Defect(
        "gradient of the block's own output lost beside a consumer",
        BACKWARD,
        "if self.grad_block is not None and start",
        "if self.grad_block is not None and self.plan.consumer is None and start",
        ("parts", "features", "shared"),
    ),
    Defect(
        "backward ends one tensor before the first that needs a gradient",
        BACKWARD,
        "self.plan.layer_tensors[i].stop - self.group.tensors.start)",
        "self.plan.layer_tensors[i].stop - self.group.tensors.start - 1)",
        STAGE_TESTS,
    ),
    Defect(
        "bottleneck computed ahead for a layer with keep_bottleneck",
        BACKWARD,
        "self.plan.frozen or self.plan.layers[i].keep_bottleneck or self._no_grad_needed_through(i)",
        "self._no_grad_needed_through(i)",
        STAGE_TESTS,
    ),
    Defect(
        "create_graph=True not refused",
        SHARED + "function.py",
        "    if torch.is_grad_enabled():\n",
        "    if False:\n",
        ("shared", "stem"),
    ),
    Defect(
        "a failed backward stays in the graph",
        SHARED + "function.py",
        "weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()",
        "dict[int, _Entry] = {}",
        ("shared_autograd",),
    ),
    Defect(
        "the first block's parts used for the next block too",
        "engines/sequence.py",
        "first_parts if module is first_block else None",
        "first_parts",
        ("stem",),
    ),
    # The stem
    Defect(
        "stem: inactive maxima get a gradient", "engines/stem/backward.py", "(inactive, -1)", "(inactive, 0)", ("stem",)
    ),
    Defect(
        "stem: variance of the last tile only",
        "engines/stem/forward.py",
        "square_sum[tile[1]] += ",
        "square_sum[tile[1]] = ",
        ("stem",),
    ),
    Defect(
        "stem: grad_weight of the first tile only",
        "engines/stem/backward.py",
        "total.add_(partial)",
        "total",
        ("stem",),
    ),
    # Portable kernels
    Defect(
        "portable: sums of the first tile only",
        PORTABLE,
        "total.add_(partial)",
        "total",
        STAGE_TESTS,
    ),
    Defect(
        "portable: tiles overlap by a row",
        PORTABLE,
        "yield slice(start, min(",
        "yield slice(max(0, start - 1), min(",
        STAGE_TESTS,
    ),
    Defect(
        "portable: overwrite ignored",
        PORTABLE,
        "    if accumulator.overwrite:\n",
        "    if False:\n",
        ("shared", "triton_kernels", "numba_kernels"),
    ),
    # Numba kernels
    Defect(
        "numba: halo one row short",
        NUMBA + "kernels.py",
        "end = min(args.rows, stop + halo)",
        "end = min(args.rows, stop + halo - 1)",
        ("numba_kernels",),
    ),
    Defect(
        "numba: a thread's halo starts one row late",
        NUMBA + "kernels.py",
        "origin = done = max(0, first - halo)",
        "origin = done = max(0, first - halo + 1)",
        ("numba_kernels",),
    ),
    Defect(
        "numba: scratch for the halo of one side only",
        NUMBA + "operations.py",
        "rows * per_row + 2 * halo * columns",
        "rows * per_row + halo * columns",
        ("numba_kernels",),
    ),
    Defect(
        "numba: row strides of gradient and values swapped",
        NUMBA + "accumulation.py",
        "elements(input.values.data, row * input.values.row_stride + left",
        "elements(input.values.data, row * accumulator.grad_accum.row_stride + left",
        ("numba_kernels",),
    ),
    Defect(
        "numba: the last thread's sums lost",
        NUMBA + "accumulation.py",
        "        total = 0.0\n        for i in range(threads):",
        "        total = 0.0\n        for i in range(max(1, threads - 1)):",
        ("numba_kernels",),
    ),
    Defect(
        "numba: the last thread's split-K partial sum lost",
        NUMBA + "convolution.py",
        "for i in range(1, threads):",
        "for i in range(1, threads - 1):",
        ("numba_kernels",),
    ),
    Defect(
        "numba: panels not padded with zeros",
        NUMBA + "gemm.py",
        "if thread == 0 and columns % panel:",
        "if False:",
        ("numba_kernels",),
    ),
    Defect(
        "numba: K-blocks after the first overwrite",
        NUMBA + "gemm.py",
        "min(_K_BLOCK, k - start), accumulate or start > 0",
        "min(_K_BLOCK, k - start), accumulate",
        ("numba_kernels",),
    ),
    Defect(
        "numba: im2col reads past the right edge",
        NUMBA + "im2col.py",
        "3 if x + dilation < width else 2",
        "3 if x + dilation <= width else 2",
        ("numba_kernels",),
    ),
    Defect(
        "numba: col2im takes taps of the neighboring row",
        NUMBA + "im2col.py",
        "if dilation <= x < width - dilation:",
        "if dilation <= x <= width - dilation:",
        ("numba_kernels",),
    ),
    Defect(
        "numba: windows of an odd width start at the wrong pixel",
        NUMBA + "pooling.py",
        "return top * images.width + row % width * 2",
        "return top * width * 2 + row % width * 2",
        ("numba_kernels",),
    ),
    Defect(
        "numba: Chan's term of the difference of means missing",
        NUMBA + "statistics.py",
        "tile_squares[j] + delta * delta * before * count / (before + count)",
        "tile_squares[j]",
        ("numba_kernels",),
    ),
    Defect(
        "numba: batch norm backward without its constant",
        NUMBA + "affine.py",
        "values[j] * scale[j] + shift[j] + grad_accum[j]",
        "values[j] * scale[j] + grad_accum[j]",
        ("numba_kernels",),
    ),
    Defect(
        "numba: gradients of pixels outside all pooling windows uninitialized",
        NUMBA + "operations.py",
        "if accumulator.overwrite and any(side % 2 for side in shape[1:]):",
        "if False:",
        ("numba_kernels", "shared"),
    ),
    Defect(
        "numba: the last channels of the next bottleneck's weight not packed",
        NUMBA + "kernels.py",
        "pack_weight(following.weight, thread, threads, zero)",
        "pack_weight(following.weight, thread, threads + 1, zero)",
        ("numba_kernels", "shared"),
    ),
    # Triton kernels
    Defect(
        "triton: rows past the last one in the mean",
        TRITON + "statistics_kernels.py",
        "tl.where(mask, values, 0.0)",
        "tl.where(mask, values, 1.0)",
        ("triton_kernels",),
    ),
    Defect(
        "triton: the last tile counted as a whole one",
        TRITON + "statistics_kernels.py",
        "mask, 0.0) * count",
        "mask, 0.0) * BLOCK_ROWS",
        ("triton_kernels",),
    ),
    Defect(
        "triton: one split's sums lost",
        TRITON + "operations.py",
        "    sums = partial_sums.sum(0)\n",
        "    sums = partial_sums[: max(1, len(partial_sums) - 1)].sum(0)\n",
        ("triton_kernels",),
    ),
    Defect(
        "triton: one split's grad_weight lost",
        TRITON + "operations.py",
        "return partial_grad_weight.sum(0) if",
        "return partial_grad_weight[: max(1, len(partial_grad_weight) - 1)].sum(0) if",
        ("triton_kernels",),
    ),
    Defect(
        "triton: weight loaded past its last channel",
        TRITON + "kernels.py",
        "out_mask[:, None] & channel_mask[None, :]\n    w = tl.load(weight + weight_offsets",
        "out_mask[:, None] | channel_mask[None, :]\n    w = tl.load(weight + weight_offsets",
        ("triton_kernels",),
    ),
    Defect(
        "triton: ReLU's mask inverted",
        TRITON + "kernels.py",
        "grad = tl.where(activation <= 0, 0.0,",
        "grad = tl.where(activation > 0, 0.0,",
        ("triton_kernels",),
    ),
    # Choosing an engine and kernels
    Defect(
        "dispatch: falls back though the shared engine could run",
        "engines/dispatch.py",
        "best, *others = Engine.SHARED, Engine.CHECKPOINT,",
        "best, *others = Engine.CHECKPOINT, Engine.CHECKPOINT,",
        ("engines", "shared", "dims"),
    ),
    Defect(
        "dispatch: a named engine falls back silently",
        "engines/dispatch.py",
        "    if plan is None:\n        raise RuntimeError(",
        "    if plan is None:\n        return _best_plan(block, x, parts)\n        raise RuntimeError(",
        ("engines", "shared"),
    ),
    Defect("dispatch: warns each time", "engines/dispatch.py", "_warned.add(message)", "pass", ("engines", "shared")),
    Defect(
        "eligibility: norms that disagree are accepted",
        "engines/eligibility.py",
        "or _why_not_norms(layers, x)",
        "or None",
        ("shared",),
    ),
    Defect(
        "kernels: Numba's for bfloat16 too",
        "engines/kernels/__init__.py",
        "_NUMBA_DTYPES = (torch.float32, torch.float64)",
        "_NUMBA_DTYPES = (torch.float32, torch.float64, torch.bfloat16)",
        ("numba_kernels",),
    ),
    # Recomputation and norms
    Defect(
        "checkpoint: random state not restored after the recomputation",
        "checkpoint/states.py",
        "            self._set(current)",
        "            pass",
        CHECKPOINT,
    ),
    Defect(
        "checkpoint: other random numbers in the recomputation",
        "checkpoint/states.py",
        "        self._set(self.states)",
        "        pass",
        CHECKPOINT,
    ),
    Defect(
        "checkpoint: an input changed in place goes unnoticed",
        "checkpoint/recomputation.py",
        "if [tensor._version for tensor in inputs] != versions:",
        "if False:",
        CHECKPOINT,
    ),
    Defect(
        "checkpoint: training mode not restored",
        "checkpoint/recomputation.py",
        "            module.training = training\n",
        "            pass\n",
        CHECKPOINT,
    ),
    Defect(
        "checkpoint: tensor hooks run twice",
        "checkpoint/function.py",
        "        hooks.clear()",
        "        pass",
        CHECKPOINT,
    ),
    Defect(
        "norms: running statistics updated in the recomputation too",
        "norms/batch_norm.py",
        "b if b is None else b.clone()",
        "b",
        ("batchnorm",),
    ),
    Defect(
        "synchronized norms: variances without the difference of means",
        "norms/sync_batch_norm.py",
        "(variances + (means - mean).square())",
        "variances",
        ("distributed",),
    ),
    Defect(
        "synchronized norms: sums of one process only",
        "norms/sync_batch_norm.py",
        "dist.all_reduce(reduced, group=self.group)",
        "pass",
        ("distributed",),
    ),
    # Other libraries' models and weights
    Defect(
        "adapt: gradients not compared",
        "adapt/verify.py",
        "return [output.detach(), x.grad, *states,",
        "return [output.detach(), *states,",
        ("adapt_verify", "adapt"),
    ),
    Defect(
        "adapt: random states not compared",
        "adapt/verify.py",
        "return [output.detach(), x.grad, *states,",
        "return [output.detach(), x.grad,",
        ("adapt_verify", "adapt"),
    ),
    Defect(
        "weights: Keras's kernels transposed",
        "weights/load.py",
        "tensor.permute(3, 2, 0, 1)",
        "tensor.permute(3, 2, 1, 0)",
        ("weights",),
    ),
    Defect(
        "weights: repeated input channels not scaled",
        "weights/load.py",
        "weight[:, indices] * (weight.shape[1] / channels)",
        "weight[:, indices]",
        ("weights",),
    ),
    # Training and data
    Defect(
        "training: random numbers independent of the seed",
        "training/loop.py",
        "lr, (options.seed, epoch, number))",
        "lr, (0, epoch, number))",
        ("training", "runs"),
    ),
    Defect(
        "training: a resumed epoch numbers its steps from 0",
        "training/loop.py",
        "enumerate(fetched, start=position.step)",
        "enumerate(fetched)",
        ("training", "runs"),
    ),
    Defect(
        "training: the schedule is an epoch late",
        "training/recipes.py",
        "    done = epoch - 1\n",
        "    done = epoch - 2\n",
        ("training",),
    ),
    Defect(
        "training: micro-batches scaled by their own size",
        "training/loop.py",
        "self.context.world_size / global_batch_size)",
        "self.context.world_size / len(some_images))",
        ("training", "distributed"),
    ),
    Defect(
        "training: last.pt not written after an epoch",
        "training/run.py",
        "        self._save()\n        self.tensorboard",
        "        self.tensorboard",
        ("runs", "run_failures", "kills"),
    ),
    Defect(
        "training: files written in place",
        "training/files.py",
        'temporary = path.with_name(f".{path.name}{_SUFFIX}")',
        "temporary = path",
        ("runs", "run_failures", "kills"),
    ),
    Defect(
        "data: labels shifted",
        "training/data/images.py",
        "yield self.images[indices], self.labels[indices]",
        "yield self.images[indices], self.labels[indices].roll(1)",
        ("images", "data", "training"),
    ),
    Defect(
        "data: crops exchange row and column",
        "training/data/augment.py",
        "rows, columns = offsets",
        "columns, rows = offsets",
        ("images", "data", "training"),
    ),
]
