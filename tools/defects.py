"""Defects that the tests must catch, as data: one small edit of the package each, which `plant_defects.py` makes."""

from typing import NamedTuple


class Defect(NamedTuple):
    """`old` occurs exactly once in `file`, a path inside the package; `tests` are the test files to try first."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


STAGE = "engines/shared/stage.py"
STATISTICS = "engines/shared/statistics.py"
PORTABLE = "engines/kernels/portable.py"
NUMBA = "engines/kernels/numba_cpu/loops.py"
NUMBA_HOST = "engines/kernels/numba_cpu/operations.py"
TRITON = "engines/kernels/triton_gpu/kernels.py"
TRITON_HOST = "engines/kernels/triton_gpu/operations.py"

SHARED_TESTS = ("shared", "shared_matrix", "shared_autograd")

DEFECTS = [
    # The shared engine
    Defect(
        "batch norm backward without the mean term",
        STATISTICS,
        "slope, shift = product_sum * inv_std * per_value, grad_sum * per_value",
        "slope, shift = product_sum * inv_std * per_value, 0 * grad_sum",
        SHARED_TESTS,
    ),
    Defect(
        "batch norm backward without the product term",
        STATISTICS,
        "slope, shift = product_sum * inv_std * per_value, grad_sum * per_value",
        "slope, shift = 0 * product_sum, grad_sum * per_value",
        SHARED_TESTS,
    ),
    Defect(
        "momentum of the running statistics the wrong way round",
        STATISTICS,
        "kept.lerp_(found, momentum)",
        "kept.lerp_(found, 1 - momentum)",
        SHARED_TESTS,
    ),
    Defect(
        "running variance biased",
        STATISTICS,
        "return variance * (count / (count - 1))",
        "return variance * 1",
        SHARED_TESTS,
    ),
    Defect(
        "eps outside the square root",
        STATISTICS,
        "variance.add_(self.eps).rsqrt_()",
        "variance.rsqrt_().add_(-self.eps)",
        SHARED_TESTS,
    ),
    Defect(
        "frozen norms scale the gradient as if they were not",
        STATISTICS,
        "return self.scale if frozen else self.weight",
        "return self.weight",
        SHARED_TESTS,
    ),
    Defect(
        "running statistics updated in a recomputation too",
        STATISTICS,
        "if not norm.track_running_stats or in_backward():",
        "if not norm.track_running_stats:",
        ("batchnorm", "shared"),
    ),
    Defect(
        "a channel less in what a consumer's gradient means for the statistics",
        STATISTICS,
        "self.product_sum[place].addcmul_(consumer.weight, consumer.grad_weight)",
        "self.product_sum[place][1:].addcmul_(consumer.weight[1:], consumer.grad_weight[1:])",
        SHARED_TESTS,
    ),
    Defect(
        "newest channels first ends one channel too early",
        STATISTICS,
        "slice(self.total - stop, self.total - start) if self.newest_first",
        "slice(self.total - stop, self.total - start - 1) if self.newest_first",
        ("parts",),
    ),
    Defect(
        "newest channels first ignored",
        STATISTICS,
        "slice(self.total - stop, self.total - start) if self.newest_first",
        "slice(start, stop) if self.newest_first",
        ("parts",),
    ),
    Defect(
        "dropout's gradient not scaled",
        STAGE,
        "grad.mul_(self.kept.pop()).div_(1 - drop_rate or 1)",
        "grad.mul_(self.kept.pop())",
        SHARED_TESTS,
    ),
    Defect(
        "a bottleneck's second weight without a gradient",
        STAGE,
        "self.grads[stop - 3 : stop] = norm.grad_weight, norm.grad_bias, of_kernel",
        "self.grads[stop - 3 : stop] = norm.grad_weight, norm.grad_bias, None",
        SHARED_TESTS,
    ),
    Defect(
        "norm's weight and bias exchange their gradients",
        STAGE,
        "found = [norm.grad_weight, norm.grad_bias, *",
        "found = [norm.grad_bias, norm.grad_weight, *",
        SHARED_TESTS,
    ),
    Defect(
        "the gradient of the block's own output lost",
        STAGE,
        "if self.direct is not None:",
        "if self.direct is not None and self.stage.consumer is None:",
        ("parts", "features"),
    ),
    Defect(
        "a layer that learns taken for the last one",
        STAGE,
        "until = max(0, self.stage.places[i].stop - self.portion.tensors.start)",
        "until = max(0, self.stage.places[i].stop - self.portion.tensors.start - 1)",
        SHARED_TESTS,
    ),
    Defect(
        "create_graph=True not refused",
        STAGE,
        "    if torch.is_grad_enabled():\n        raise RuntimeError(",
        "    if False:\n        raise RuntimeError(",
        ("shared", "stem"),
    ),
    # The stem
    Defect(
        "stem: gradients of masked maxima not masked",
        "engines/stem.py",
        "masked_fill_(shut, -1)",
        "masked_fill_(shut, 0)",
        ("stem",),
    ),
    Defect(
        "stem: the square sum of the last tile only",
        "engines/stem.py",
        "square_sum[tile[1]] += made",
        "square_sum[tile[1]] = made",
        ("stem",),
    ),
    Defect(
        "stem: a tile's gradient of the weight lost",
        "engines/stem.py",
        "else total.add_(part) for total, part in",
        "else total for total, part in",
        ("stem",),
    ),
    # Portable kernels
    Defect(
        "portable: a tile's sums lost",
        PORTABLE,
        "return tuple(part if total is None else total.add_(part)",
        "return tuple(part if total is None else total",
        SHARED_TESTS,
    ),
    Defect(
        "portable: tiles overlap by a row",
        PORTABLE,
        "yield slice(start, min(start + each, num_rows))",
        "yield slice(max(0, start - 1), min(start + each, num_rows))",
        SHARED_TESTS,
    ),
    Defect(
        "portable: the first gradient added to what was there",
        PORTABLE,
        "    if into.overwrite:\n",
        "    if False:\n",
        ("shared", "gpu_kernels", "compiled_kernels"),
    ),
    # Numba kernels
    Defect(
        "numba: halo off by one row",
        NUMBA,
        "wanted = min(job.rows, stop + beyond)",
        "wanted = min(job.rows, stop + beyond - 1)",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: halo of the first rows of a thread off by one",
        NUMBA,
        "origin = done = max(0, first - beyond)",
        "origin = done = max(0, first - beyond + 1)",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: row strides of the gradient and of the values swapped",
        NUMBA,
        "value = _at(job.values, row * job.values_line + left, width, zero)",
        "value = _at(job.values, row * job.pending_line + left, width, zero)",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: the last thread's partial sums lost",
        NUMBA,
        "        total = 0.0\n        for i in range(threads):",
        "        total = 0.0\n        for i in range(max(1, threads - 1)):",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: the last thread's gradient of the weight lost",
        NUMBA,
        "for i in range(1, threads):",
        "for i in range(1, threads - 1):",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: padding of the packed panels not zeroed",
        NUMBA,
        "if thread == 0 and columns % panel:",
        "if False:",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: a column outside the image gathered",
        NUMBA,
        "left, right = 0 if x >= reach else 1, 3 if x + reach < breadth else 2",
        "left, right = 0 if x >= reach else 1, 3 if x + reach <= breadth else 2",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: pooled rows of an odd width begin at the wrong pixel",
        NUMBA,
        "return top * job.breadth + row % breadth * 2",
        "return top * breadth * 2 + row % breadth * 2",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: variances of two chunks joined without the difference of their means",
        NUMBA,
        "squares[j] += own_squares[j] + apart * apart * before * count / (before + count)",
        "squares[j] += own_squares[j]",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: K-blocks after the first overwrite",
        NUMBA,
        "min(_DEPTH, count - start), add or start > 0",
        "min(_DEPTH, count - start), add",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: the next bottleneck's weight packed with this one's channels",
        NUMBA,
        "job.ahead_panels, job.ahead_channels, False)",
        "job.ahead_panels, job.ahead_channels - 1, False)",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: batch norm backward without its constant",
        NUMBA,
        "value[j] * slope[j] + constant[j] + pending[j] * share[j]",
        "value[j] * slope[j] + pending[j] * share[j]",
        ("compiled_kernels",),
    ),
    Defect(
        "numba: pixels that no window pools keep what was in memory",
        NUMBA_HOST,
        "if into.overwrite and any(side % 2 for side in shape[1:]):",
        "if False:",
        ("compiled_kernels", "shared"),
    ),
    Defect(
        "numba: scratch for a halo of one side only",
        NUMBA_HOST,
        "room = tile * per_row + 2 * beyond",
        "room = tile * per_row + beyond",
        ("compiled_kernels",),
    ),
    # Triton kernels
    Defect(
        "triton: rows beyond the last one measured",
        TRITON,
        "mean = tl.sum(tl.where(there, values, 0.0), 0) / count",
        "mean = tl.sum(tl.where(there, values, 1.0), 0) / count",
        ("gpu_kernels",),
    ),
    Defect(
        "triton: count of the last tile's rows not that of a whole one",
        TRITON,
        "        count = tl.minimum(BLOCK_ROWS, rows - tile * BLOCK_ROWS)[:, None]\n        total +=",
        "        count = BLOCK_ROWS\n        total +=",
        ("gpu_kernels",),
    ),
    Defect(
        "triton: one split of the sums lost",
        TRITON_HOST,
        "    sums = parts.sum(0)\n",
        "    sums = parts[: max(1, len(parts) - 1)].sum(0)\n",
        ("gpu_kernels",),
    ),
    Defect(
        "triton: channels beyond the last one multiplied",
        TRITON,
        "weight_place, weight_there = _offsets(made_column, channels, column), made_inside[:, None] & inside[None, :]",
        "weight_place, weight_there = _offsets(made_column, channels, column), made_inside[:, None] | inside[None, :]",
        ("gpu_kernels",),
    ),
    Defect(
        "triton: the ReLU's mask at the other side",
        TRITON,
        "grad = tl.where(activation <= 0, 0.0,",
        "grad = tl.where(activation > 0, 0.0,",
        ("gpu_kernels",),
    ),
    # Choosing
    Defect(
        "dispatch: falls back although the shared engine could run",
        "engines/dispatch.py",
        "best, *others = Engine.SHARED, Engine.CHECKPOINT, Engine.PLAIN",
        "best, *others = Engine.CHECKPOINT, Engine.CHECKPOINT, Engine.PLAIN",
        ("engines", "shared", "dims"),
    ),
    Defect(
        "dispatch: an engine asked for by name falls back silently",
        "engines/dispatch.py",
        "        if reason is not None:\n            raise RuntimeError(",
        "        if reason is not None:\n            return Engine.PLAIN\n            raise RuntimeError(",
        ("engines", "shared"),
    ),
    Defect(
        "dispatch: warns each time",
        "engines/dispatch.py",
        "_warned.add(message)",
        "pass",
        ("engines", "shared", "other_norms"),
    ),
    Defect(
        "eligibility: norms that disagree are taken",
        "engines/eligibility.py",
        "or _why_not_norms(layers, x)",
        "or None",
        ("shared",),
    ),
    Defect(
        "kernels: low precision given to Numba",
        "engines/kernels/__init__.py",
        "_COMPILED_DTYPES = (torch.float32, torch.float64)",
        "_COMPILED_DTYPES = (torch.float32, torch.float64, torch.bfloat16)",
        ("compiled_kernels",),
    ),
    # Recomputation
    Defect(
        "checkpoint: random state not restored after the recomputation",
        "checkpoint/states.py",
        "            self._set(present)",
        "            pass",
        ("checkpoint",),
    ),
    Defect(
        "checkpoint: random numbers not those of the forward",
        "checkpoint/states.py",
        "self._set(self.states)",
        "pass",
        ("checkpoint", "engines"),
    ),
    Defect(
        "checkpoint: an input changed in place not noticed",
        "checkpoint/recomputation.py",
        "if [tensor._version for tensor in inputs] != versions:",
        "if False:",
        ("checkpoint",),
    ),
    Defect(
        "checkpoint: training mode not restored",
        "checkpoint/recomputation.py",
        "            module.training = mode\n        try:",
        "            pass\n        try:",
        ("checkpoint", "engines"),
    ),
    Defect(
        "checkpoint: a parameter hook fires twice",
        "checkpoint/function.py",
        "for hooks, _ in silenced:\n        hooks.clear()",
        "for hooks, _ in silenced:\n        pass",
        ("checkpoint", "engines"),
    ),
    # Norms
    Defect(
        "norms: updated in the recomputation too",
        "norms/batch_norm.py",
        "name: b if b is None else b.clone()",
        "name: b if b is None else b",
        ("batchnorm",),
    ),
    Defect(
        "synchronized norms: variances joined without the difference of means",
        "norms/sync_batch_norm.py",
        "(variances + (means - mean).square())",
        "variances",
        ("team",),
    ),
    Defect(
        "synchronized norms: sums of one process only",
        "norms/sync_batch_norm.py",
        "dist.all_reduce(joined, group=self.group)",
        "pass",
        ("team",),
    ),
    # Other libraries' models and weights
    Defect(
        "adapt: the trial does not compare gradients",
        "adapt/trial.py",
        "return [output.detach(), x.grad, *state,",
        "return [output.detach(), *state,",
        ("adapt",),
    ),
    Defect(
        "adapt: the trial does not compare random numbers",
        "adapt/trial.py",
        "return [output.detach(), x.grad, *state,",
        "return [output.detach(), x.grad,",
        ("adapt",),
    ),
    Defect(
        "weights: a kernel of Keras's transposed",
        "weights/load.py",
        "tensor.permute(3, 2, 0, 1)",
        "tensor.permute(3, 2, 1, 0)",
        ("weights",),
    ),
    Defect(
        "weights: repeated channels not scaled",
        "weights/load.py",
        "return weight[:, turns] * (weight.shape[1] / channels)",
        "return weight[:, turns]",
        ("weights",),
    ),
    # Training
    Defect(
        "training: random numbers of a step do not depend on the seed",
        "training/loop.py",
        "lr, (options.seed, epoch, number))",
        "lr, (0, epoch, number))",
        ("training", "runs"),
    ),
    Defect(
        "training: a resumed run numbers its steps from the start",
        "training/loop.py",
        "enumerate(fetched, start=position.step)",
        "enumerate(fetched)",
        ("runs", "training"),
    ),
    Defect(
        "training: learning rate an epoch late",
        "training/recipes.py",
        "    done = epoch - 1\n",
        "    done = epoch - 2\n",
        ("training",),
    ),
    Defect(
        "training: micro-batches weighted by their own size",
        "training/loop.py",
        "self.team.size / joined)",
        "self.team.size / len(some))",
        ("training", "team"),
    ),
    Defect(
        "training: the position saved before the weights of the best epoch",
        "training/run.py",
        "        self._save()\n        self.events.add(row)",
        "        self.events.add(row)",
        ("runs", "kills"),
    ),
    Defect(
        "training: files written in place",
        "training/files.py",
        'temporary = path.with_name(f".{path.name}{_UNFINISHED}")',
        "temporary = path",
        ("runs", "kills"),
    ),
    Defect(
        "data: labels shifted by one",
        "training/data/images.py",
        "            yield self.images[index], self.labels[index]",
        "            yield self.images[index], self.labels[index].roll(1)",
        ("data", "training"),
    ),
    Defect(
        "data: crops of the wrong row",
        "training/data/augment.py",
        "rows, columns = offsets.to(images.device)",
        "columns, rows = offsets.to(images.device)",
        ("data", "training"),
    ),
]
