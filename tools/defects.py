"""Defects that the tests must catch, about one for each promise: each is a small edit, applied by `plant_defects.py`.

A defect names no file: its text occurs exactly once in the package and the demos, on one line of arithmetic that has
little reason to change.
"""

from typing import NamedTuple


class Defect(NamedTuple):
    """The text `old` becomes `new`; `tests` are the test files to try first, test_<name>.py."""

    name: str
    old: str
    new: str
    tests: str


DEFECTS = [
    # The shared engine
    Defect(
        "running statistics: the momentum the wrong way round",
        "foreach_lerp_(updated, batch, weight)",
        "foreach_lerp_(updated, batch, 1 - weight)",
        "shared_matrix",
    ),
    Defect(
        "running statistics: the variance is biased",
        "self.matrix[VARIANCE].mul_(self.count / (self.count - 1))",
        "pass",
        "shared_matrix",
    ),
    Defect(
        "running statistics: updated again in a recomputation",
        "graph_task_id() != -1",
        "False",
        "batchnorm shared",
    ),
    Defect(
        "batch norm backward without the mean term",
        "constant, slope = (self.sums * per_value).unbind()",
        "constant, slope = (self.sums * per_value * torch.eye(2)[1:].T).unbind()",
        "shared",
    ),
    Defect(
        "batch norm backward without the product term",
        "slope = slope * self.inv_std",
        "slope = 0 * slope",
        "shared_matrix",
    ),
    Defect("frozen norm: a bias before it is not subtracted from its mean", "mean.sub_(bias)", "pass", "shared"),
    Defect(
        "frozen norm: a gradient scaled by inv_std twice",
        "return self.scale if",
        "return self.scale * self.inv_std if",
        "shared_matrix frozen_norms",
    ),
    Defect(
        "dropout: mask not scaled in the backward",
        "grad_output.mul_(to_pixel_matrix(mask)).mul_(1 / (1 - layer.drop_rate or 1))",
        "grad_output.mul_(to_pixel_matrix(mask))",
        "shared_matrix",
    ),
    Defect("bias of new channels missing in the running mean", "mean.add_(bias)", "pass", "shared"),
    Defect(
        "order of channels: segments from the oldest to the newest in every block",
        "return views[::-1] if self.newest_first else views",
        "return views",
        "shared_matrix operators",
    ),
    Defect(
        "layer groups: gradients of a stage released all at once",
        "size + own > LAYER_GROUP_BYTES",
        "False",
        "shared_autograd",
    ),
    Defect(
        "second derivatives: dropout not scaled",
        "x = x * mask * (1 / (1 - layer.drop_rate or 1))",
        "x = x * mask",
        "second_order",
    ),
    Defect(
        "compiled: the fake output of a transition is not pooled",
        "sides = [side // 2 for side in sides]",
        "sides = list(sides)",
        "operators",
    ),
    Defect(
        "autocast: volumes stay in bf16 where plain's are float32",
        "output = as_dtype(output, average_pool_dtype(output))",
        "average_pool_dtype(output)",
        "dims",
    ),
    Defect("choice of engine: norms that disagree are accepted", "or _why_not_norms(layers, x)", "or None", "shared"),
    Defect(
        "choice of engine: sharded layers are run without their hooks",
        "why_sharded(module) or hooked",
        "None if why_sharded(module) else hooked",
        "sharded_engines",
    ),
    # Kernels
    Defect(
        "portable: tiles overlap by a row", "[slice(start, min(", "[slice(max(0, start - 1), min(", "portable_kernels"
    ),
    Defect(
        "Numba: the halo is one row short",
        "end = min(args.rows, stop + halo)",
        "end = min(args.rows, stop + halo - 1)",
        "numba_kernels",
    ),
    Defect(
        "Numba: im2col reads past the right edge of a dilated tap",
        "3 if x + dilation < width else 2",
        "3 if x + dilation <= width else 2",
        "numba_kernels",
    ),
    Defect(
        "Numba: the last thread's split-K partial sum lost",
        "for i in range(1, threads):",
        "for i in range(1, threads - 1):",
        "numba_kernels",
    ),
    Defect(
        "Numba: statistics of tiles combined without the difference of their means",
        "tile_squares[j] + delta * delta * before * count / (before + count)",
        "tile_squares[j]",
        "numba_kernels",
    ),
    Defect(
        "Numba: bfloat16 rounds ties up",
        "builder.add(builder.add(bits, odd), _WHOLE(0x7FFF))",
        "builder.add(bits, _WHOLE(0x8000))",
        "bfloat16_kernels",
    ),
    Defect(
        "AMX: rows past the last one of B are multiplied", "if start + TILE_ROWS <= k:", "if True:", "bfloat16_products"
    ),
    Defect(
        "Triton: rows past the last one in the mean",
        "tl.where(mask, values, 0.0)",
        "tl.where(mask, values, 1.0)",
        "triton_kernels",
    ),
    Defect(
        "Triton: one split's grad_weight lost",
        "partial_grad_weight, weight_splits, ",
        "partial_grad_weight, tl.maximum(weight_splits - 1, 1), ",
        "triton_kernels",
    ),
    Defect(
        "Triton: a 3×3 convolution's neighbor of another image",
        "(y + dy >= 0) & (y + dy < height) & ",
        "(y + dy >= 0) & ",
        "triton_conv3x3",
    ),
    Defect(
        "Triton: taps not mirrored in the gradient of a 3×3 convolution's input",
        "offsets(row - dy * width - dx, ",
        "offsets(row + dy * width + dx, ",
        "triton_conv3x3",
    ),
    Defect(
        "Triton: TF32 truncated instead of rounded",
        "(bits + 0x1000) & 0xFFFFE000",
        "bits & 0xFFFFE000",
        "triton_conv1x1 triton_conv3x3",
    ),
    Defect(
        "Triton: the last of equal maxima gets the stem's gradient",
        "((y > maximum) | (y != y))",
        "((y >= maximum) | (y != y))",
        "triton_stem",
    ),
    Defect(
        "Triton: a kernel compiled for aligned tensors is launched on others",
        "*[each is None or each & 15 == 0 for each in addresses]",
        "*[True for _ in addresses]",
        "triton_launch",
    ),
    Defect(
        "first contact: a slice's rows are made contiguous on the device",
        "return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())",
        "return tensor.to(device)",
        "compile_ahead",
    ),
    Defect(
        "kernel cache: a file is used whatever its checksum",
        "if checksum != _checksum(key, content):",
        "if not content:",
        "kernel_cache",
    ),
    Defect(
        "kernel cache: one linker for all object files",
        'linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)',
        "linker = _target().codegen()._engine._ee",
        "kernel_cache",
    ),
    # Checkpointing, several processes
    Defect("checkpoint: other random numbers in the recomputation", "self._set(self.states)", "pass", "checkpoint"),
    Defect("checkpoint: training mode not restored", "module.training = self.training", "pass", "checkpoint_sharded"),
    Defect(
        "checkpoint: an input changed in place goes unnoticed",
        "if [tensor._version for tensor in inputs] != versions:",
        "if False:",
        "checkpoint_arguments",
    ),
    Defect(
        "synchronized norms: sums of one process only",
        "dist.all_reduce(reduced, group=self.group)",
        "pass",
        "distributed",
    ),
    # Conversions and weights
    Defect(
        "conversion: operations not compared",
        "operations = _operations_beyond(expected, actual)",
        "operations = []",
        "adapt_exactness",
    ),
    Defect(
        "conversion: gradients of parameters not compared",
        "_agree(actual.gradients, expected.gradients)",
        "_agree(actual.gradients[:1], expected.gradients[:1])",
        "adapt_exactness adapt_verify",
    ),
    Defect(
        "conversion: a changed buffer goes unnoticed", "\n    if after == before:", "\n    if True:", "adapt_exactness"
    ),
    Defect(
        "conversion: random states not compared", "_agree(actual.states, expected.states)", "True", "adapt_verify adapt"
    ),
    Defect(
        "conversion: a layer's new channels are taken from the wrong end",
        "output[:, :new] if self.newest_first else output[:, -new:]",
        "output[:, -new:]",
        "adapt_families",
    ),
    # Conversion: what is converted, and its report
    Defect(
        "conversion: blocks without norms are left alone",
        "reason is None or _convert_whole(module, engine)",
        "reason is None",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: a block without norms is found in the outermost module that has its convolutions",
        "convolutions[1:]) and not any(map(is_block_without_norms, block.children()))",
        "convolutions[1:])",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: any convolutions are a block without norms",
        "return all(each.in_channels == width for each, width in zip(convolutions, widths, strict=False))",
        "return True",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: an engine by name that cannot run a block without norms recomputes it",
        "if engine in (Engine.PLAIN, Engine.SHARED) or not is_block",
        "if not is_block",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: convolutions of an author's class are overlooked",
        "isinstance(each, _ConvNd) or _is_custom_convolution(each)]",
        "isinstance(each, _ConvNd)]",
        "adapt_convert",
    ),
    Defect(
        "conversion: a module's second name makes it a layer",
        "children = [child for child in children if child not in inside]",
        "inside.clear()",
        "adapt_convert",
    ),
    Defect(
        "conversion: a graph of torch.fx is said to be a list of layers",
        "if isinstance(graph, GraphModule):",
        "if False:",
        "adapt_convert",
    ),
    Defect(
        "conversion: tracing into a converted block is not told",
        "if any(isinstance(each, Proxy) for each in args) and not for_quantization:",
        "if False:",
        "adapt_convert",
    ),
    Defect(
        "conversion: modules of any width go through the whole trial",
        "if not (fitting or looks_dense(block)):",
        "if False:",
        "adapt_convert",
    ),
    Defect(
        "conversion: sequences of torch's own modules are tried",
        "if not (looks_dense(block) or may_concatenate(block)):",
        "if False:",
        "adapt_convert",
    ),
    Defect(
        "conversion: layers of a block are said to save what plain saves",
        "kept_before, kept = (block.saved_values_per_pixel(each) for each in (Engine.PLAIN, used))",
        "kept_before, kept = (block.saved_values_per_pixel(Engine.PLAIN) for each in (Engine.PLAIN, used))",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: restored blocks keep the class of converted ones",
        "    remove_mixin(block, ConvertedBlock)\n",
        "    pass\n",
        "blocks_without_norms adapt",
    ),
    Defect(
        "conversion: a changed attribute is no reason to leave a block to its author's forward",
        "        change = self._state_change()\n        if change is not None:",
        "        change = self._state_change()\n        if False:",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: a block's input is not copied before layers are recomputed",
        "return x if run_first_half is layerwise.run_first_half_plain else x.clone()",
        "return x",
        "blocks_without_norms",
    ),
    Defect(
        "conversion: the norms of recomputed layers are updated twice",
        "if engine in (Engine.CHECKPOINT, Engine.OFFICIAL) or self._conversion.recomputes:",
        "if False:",
        "adapt_states adapt",
    ),
    Defect("weights: keys keep their old names", "name = re.sub(pattern, replacement, name)", "pass", "weights"),
    # Training
    Defect(
        "a resumed epoch numbers its steps from 0",
        "enumerate(fetched, start=position.step)",
        "enumerate(fetched)",
        "runs",
    ),
    Defect("a lock that two processes get", "fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)", "pass", "run_lock"),
    Defect("frozen norms take the statistics of batches", "part.eval()", "part.train()", "freezing"),
]
