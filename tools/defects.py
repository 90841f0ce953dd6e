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
        "first_contact",
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
    Defect(
        "checkpoint: other random numbers in the recomputation",
        "generators, autocast, device = self.generators.restored(),",
        "generators, autocast, device = nullcontext(),",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: Python's and NumPy's random numbers are others",
        "hosts = host_generators() if any(state.has_hooks() for state in self.states) else ()",
        "hosts = ()",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: training mode not restored",
        "module.training = self.training",
        "pass",
        "checkpoint_state checkpoint_sharded",
    ),
    Defect(
        "checkpoint: attributes not restored",
        "vars(module).update(self.attributes)",
        "pass",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: calls are counted twice",
        "self.attributes = attributes | numbers",
        "self.attributes = attributes",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: buffers change twice",
        "self.module._buffers[name] = (original if values is None else values).clone()",
        "pass",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: norms of sharded modules update twice",
        "if self.changes_custom_norms or type(module) in TORCH_CLASSES.values():",
        "if False:",
        "checkpoint_sharded",
    ),
    Defect(
        "checkpoint: norms that only a closure has are not found",
        "closure = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]",
        "closure = []",
        "checkpoint checkpoint_state",
    ),
    Defect(
        "checkpoint: forward hooks fire twice",
        "if is_recomputing() and not self.affects_computation:",
        "if False:",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: hooks that affect the computation fire once",
        "self.affects_computation = True",
        "pass",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: what a hook saves is looked for in the recomputation",
        "with modes, saved_tensors_hooks(_identity, _identity):",
        "with modes:",
        "checkpoint_state",
    ),
    Defect(
        "checkpoint: hooks after the last saved tensor are not called again",
        "return not any(module._forward_hooks and not is_managed_by_fsdp(module) for module in modules)",
        "return True",
        "swapped_parameters",
    ),
    Defect(
        "checkpoint: every recomputation runs to its end",
        "early_stop = options.early_stop and may_stop_early(modules)",
        "early_stop = False",
        "checkpoint_gradients",
    ),
    Defect(
        "checkpoint: a hook of an argument fires twice",
        "            for key in hooks.keys() - kept:",
        "            for key in ():",
        "checkpoint",
    ),
    Defect(
        "checkpoint: arguments in a list are not saved by autograd",
        "if not kwargs and all(isinstance(value, Tensor) for value in args):",
        "if not kwargs:",
        "checkpoint",
    ),
    Defect(
        "checkpoint: a step before the backward goes unnoticed",
        "if self.tensor._version != self.version:",
        "if False:",
        "checkpoint_gradients",
    ),
    Defect(
        "checkpoint: replaced parameters go unnoticed",
        "if any(current.get(each) is not parameter for each, parameter in self.parameters.items()):",
        "if False:",
        "checkpoint_gradients",
    ),
    Defect(
        "checkpoint: the backward has the weight of the recomputation",
        "return _Saved(tensor) if tensor.requires_grad and is_part_of_leaf(tensor) else pack(tensor)",
        "return pack(tensor)",
        "swapped_parameters",
    ),
    Defect(
        "checkpoint: offloaded arguments stay on the device",
        "return save_on_cpu(pin_memory=torch.cuda.is_available())",
        "return nullcontext()",
        "checkpoint",
    ),
    Defect(
        "checkpoint: autocast on meta tensors not restored",
        "if any(tensor.is_meta for tensor in tensors) else {}",
        "if False else {}",
        "checkpoint",
    ),
    Defect(
        "checkpoint: random operations after a saved one draw other numbers",
        "lambda: next(states).set()",
        "lambda: next(states)",
        "checkpoint_selective",
    ),
    Defect(
        "checkpoint: more inputs than tensors are accepted",
        "if not 0 <= n <= len(args):",
        "if False:",
        "checkpoint",
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
    # Conversion: what a layer calls
    Defect(
        "conversion: the second norm has the first one's activation",
        'tuple(places[i + 1] if kinds[i + 1] == "a" else _NO_ACTIVATION for i in norms),',
        'tuple(places[norms[0] + 1] if kinds[i + 1] == "a" else _NO_ACTIVATION for i in norms),',
        "adapt_calls",
    ),
    Defect(
        "conversion: a module that is called by its forward alone is taken for a function",
        'self.calls.append("a module around" if of_torch else call)',
        "self.calls.append(call)",
        "adapt_calls",
    ),
    Defect(
        "conversion: functions inside a called module are recorded too",
        "        if not self._depth:\n            frame",
        "        if True:\n            frame",
        "adapt_calls",
    ),
    Defect(
        "conversion: constants that a function leaves out are zero",
        "kwargs.get(argument.name, argument.default_value)",
        "kwargs.get(argument.name, 0)",
        "adapt_calls",
    ),
    Defect(
        "conversion: settings of torch's modules that a forward reads are not watched",
        "for name in read & attributes.keys()}",
        "for name in ()}",
        "adapt_calls",
    ),
    Defect(
        "conversion: two names of one module may become two modules",
        "if before.ties != after.ties:",
        "if False:",
        "adapt_calls",
    ),
    Defect(
        "conversion: another dropout than the one called is applied",
        "return (module.p if module.training else 0.0), dropout",
        "return (0.3 if module.training else 0.0), dropout",
        "adapt_calls",
    ),
    Defect(
        "conversion: modules that are called in some modes only are believed",
        "if calls._replace(after=expected.after) != expected or not set(calls.after) <= set(expected.after):",
        "if False:",
        "adapt_calls",
    ),
    Defect(
        "conversion: running statistics of an author's norm are watched",
        "and name_of_buffer(module, name) not in statistics",
        "",
        "adapt_calls",
    ),
    Defect(
        "conversion: statistics that decide something are not watched",
        "return frozenset[str]().union(*normalized).difference(*read)",
        "return frozenset[str]().union(*normalized)",
        "adapt_calls",
    ),
    Defect(
        "conversion: a buffer that a forward replaces goes unnoticed",
        "if any(module._buffers.get(name) is not tensor for name, tensor in before.items()):",
        "if False:",
        "adapt_calls",
    ),
    Defect(
        "conversion: a hook on all modules does not see the layers",
        "if pattern is None or has_global_module_hooks():",
        "if pattern is None:",
        "adapt_calls",
    ),
    Defect(
        "conversion: a transition always averages",
        '"max_pool": lambda x: dimensions_of(x).max_pool(x, 2),',
        '"max_pool": lambda x: dimensions_of(x).avg_pool(x, 2),',
        "adapt_transitions",
    ),
    Defect(
        "conversion: the flags of modules without a mode are not tried",
        "return not isinstance(module, _NormBase) and not any(True for _ in module.children())",
        "return isinstance(module, nn.Dropout)",
        "adapt_calls",
    ),
    Defect(
        "conversion: the flag of the block is not tried",
        "return isinstance(module, _NormBase) or module is block",
        "return isinstance(module, _NormBase)",
        "adapt_calls",
    ),
    Defect(
        "conversion: attributes of global modules are not watched",
        "isinstance(value, (*_COMPARED_WHOLE, nn.Module))",
        "isinstance(value, _COMPARED_WHOLE)",
        "adapt_calls",
    ),
    Defect(
        "conversion: modules that are found in a list are taken for those of a name",
        "if any(pattern.calls for pattern in by_parts) and not by_names(runs[0]):",
        "if False:",
        "adapt_calls",
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
    # Memory
    Defect(
        "memory: a stage's features belong to the part of the model before it",
        "self.see(args)  # a stage allocates its features before it uses a parameter",
        "pass  # a stage allocates its features before it uses a parameter",
        "memory_predict",
    ),
    Defect(
        "memory: freed tensors are held for ever",
        "weakref.finalize(storage, self._remove, address, size,",
        "weakref.finalize(storage, self._remove, address, 0,",
        "memory_predict",
    ),
    Defect(
        "memory: a recomputation on the meta device is without autocast",
        'return "cpu" if kind == "meta" and device_type(x) != kind else kind',
        "return device_type(x)",
        "memory_predict",
    ),
    Defect(
        "memory: what is predicted is less than the smallest budget",
        "return self.held + self.tensor_peak + self.spare",
        "return self.held + self.tensor_peak",
        "memory_budget",
    ),
    Defect(
        "memory: results of a convolution have the meta device's format",
        "return formatted(output, found)",
        "return output",
        "memory_predict",
    ),
    Defect(
        "memory: all tiles of a loop are traced",
        "starts = *starts[:2], starts[-1]",
        "starts = *starts[:999], starts[-1]",
        "memory_predict",
    ),
    Defect(
        "memory: the counts of an optimizer's steps are on the device",
        "if value.dim() > 0]",
        "if value.dim() >= 0]",
        "memory_predict",
    ),
    Defect(
        "memory: hooks of the model are called",
        "memo[id(hooks)] = OrderedDict.fromkeys(hooks, _no_hook)",
        "pass",
        "memory_predict",
    ),
    Defect(
        "memory: curves are stretched to their numbers of allocations",
        "x += moment.allocated / total",
        "x += 1 / len(visits[visit])",
        "memory_predict",
    ),
    Defect(
        "memory: frees are not measured",
        "found.append((size, total, marked))",
        "found.append((size, sum(each[0] for each in found) + size, marked))",
        "memory",
    ),
    Defect(
        "memory: a budget saves what is faster to recompute",
        "MULTIPLICATIONS_A_NUMBER = 64",
        "MULTIPLICATIONS_A_NUMBER = 0",
        "memory_budget",
    ),
    Defect(
        "memory: a budget takes first what costs memory",
        'return (float("inf") if growth == 0 else layer.work / growth), layer',
        "return (0.0 if growth == 0 else layer.work / growth), layer",
        "memory_budget",
    ),
    Defect(
        "memory: saved bottlenecks are alive in every phase of a step",
        "if first[part] <= start <= last[part])",
        "if start >= 0)",
        "memory_budget",
    ),
    Defect(
        "memory: the largest batch has the first convolution's channels",
        "errors.append(error)",
        "raise",
        "memory_budget",
    ),
    Defect(
        "memory: the largest batch is one too small",
        "            return fits",
        "            return fits - 1",
        "memory_budget",
    ),
    Defect(
        "memory: a plan is used for larger inputs",
        "return all(size <= planned for size, planned in zip(shape, self._planned[1], strict=True))",
        "return True",
        "memory_budget",
    ),
    Defect(
        "memory: a KiB has 1,000 bytes",
        'UNITS = {"B": 1} | {f"{prefix}iB": 1 << 10 * i',
        'UNITS = {"B": 1} | {f"{prefix}iB": 1000**i',
        "memory_budget",
    ),
    # Training
    Defect(
        "a resumed epoch numbers its steps from 0",
        "enumerate(fetched, start=position.step)",
        "enumerate(fetched)",
        "runs",
    ),
    Defect("a lock that two processes get", "            lock.acquire()", "            path.touch()", "run_directory"),
    Defect("frozen norms take the statistics of batches", "part.eval()", "part.train()", "freezing"),
    Defect(
        "demos: a file's checksum is not compared",
        "if checksum.startswith(_MARK) and checksum != _checksum(archive):",
        "if False:",
        "run_directory",
    ),
    Defect(
        "demos: the checksums of torch.save's records are not compared",
        "damaged = archive.testzip()",
        "damaged = None",
        "run_directory",
    ),
    Defect("demos: a write that fails leaves its half", "temporary.unlink(missing_ok=True)", "pass", "run_directory"),
    Defect(
        "demos: a config's checksum is not compared",
        "if needed not in (None, _checksum(content)):",
        "if False:",
        "run_directory",
    ),
    Defect(
        "demos: a lock that was replaced goes unnoticed",
        "if not path.exists() or path.stat().st_ino != self._locked:",
        "if False:",
        "run_directory",
    ),
    Defect(
        "demos: a resumed run takes another recipe",
        "if name not in CHANGEABLE and value != started[name]:",
        "if False:",
        "run_directory",
    ),
    Defect("demos: other images go unnoticed", 'then["fingerprint"] != now["fingerprint"]', "False", "run_directory"),
    Defect("demos: a resumed run forgets its momentum", "self.optimizer.load_state_dict({", "dict({", "training"),
    Defect(
        "demos: dropout draws from the global generator",
        "torch.manual_seed(generator_for(*key, self.context.rank).initial_seed())",
        "pass",
        "training",
    ),
    Defect(
        "demos: an evaluation divides by the number of batches",
        "return loss / len(images), wrong / len(images)",
        "return loss / len(order), wrong / len(images)",
        "training",
    ),
    Defect("demos: one_cycle does not end at zero", "(done - 0.3) / 0.7", "done - 0.3", "training"),
    Defect(
        "demos: processes do not average over the global batch",
        "self.context.world_size / global_batch_size",
        "1 / global_batch_size",
        "parallel",
    ),
    Defect("demos: the worst epoch by validation is kept", "best = min(self.rows,", "best = max(self.rows,", "runs"),
    Defect("demos: images are flipped upside down", "cropped.flip(3)", "cropped.flip(2)", "images"),
    Defect(
        "demos: one crop for a whole batch",
        "(2, batch_size), generator=generator)",
        "(2, 1), generator=generator).expand(2, batch_size)",
        "images",
    ),
    Defect(
        "demos: the validation images are drawn anew by each process",
        "torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))",
        "torch.randperm(len(images))",
        "data",
    ),
    Defect(
        "demos: an image's format goes by its content",
        "formats=sorted(set(FORMATS.values()))",
        "formats=None",
        "images",
    ),
    Defect(
        "demos: a class of test/ alone gets the label of another one",
        "unknown = sorted(set(class_names(Path(directory))) - set(self.names))",
        "unknown = []",
        "data",
    ),
    Defect("demos: hidden files are images", 'if os.path.basename(path).startswith(".") or ', "if ", "data"),
    Defect("demos: a container's memory is that of its machine", "return min(limits)", "return max(limits)", "images"),
    Defect("demos: every image counts as gray", "MEAN_SATURATION = 8", "MEAN_SATURATION = 300", "predict demos"),
    Defect(
        "demos: weights are downloaded before the images are read",
        "lambda: read_state_dict(entry.source())",
        "partial(dict, read_state_dict(entry.source()))",
        "data",
    ),
    # Versions of PyTorch: private names and compilers
    Defect("versions: a name that PyTorch lacks ends the import", "MISSING[name] = feature", "raise", "torch_private"),
    Defect("versions: a lost name is warned of at every use", "_told.add(message)", "pass", "torch_private"),
    Defect(
        "versions: the shared engine starts without a name that it needs",
        "if why_not_shared() is not None:",
        "if False:",
        "torch_private",
    ),
    Defect(
        "versions: doctor is silent about lost names",
        "in dict.fromkeys(_torch_private.MISSING.values())",
        "in ()",
        "torch_private",
    ),
    Defect("versions: im2col without its private name", "and why_not(IM2COL) is None", "", "torch_private"),
    Defect(
        "versions: a cache of parametrizations goes unseen",
        "return bool(torch.nn.utils.parametrize._cache_enabled)",
        "return False",
        "torch_private",
    ),
    Defect("versions: transforms go unseen", "return _are_transforms_active()", "return False", "torch_private"),
    Defect(
        "versions: batched gradients go unseen",
        "return grad is not None and _is_legacy_batchedtensor(grad)",
        "return False",
        "torch_private",
    ),
    Defect(
        "versions: hooks on all modules go unseen",
        "return any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS)",
        "return False",
        "torch_private",
    ),
    Defect("compilers: a changed number becomes a variable", 'float(f"{value}")', "float(value)", "torch_private"),
    Defect(
        "compilers: a constant is traced", "._dynamo_marked_constant = True", "._is_constant = True", "torch_private"
    ),
    Defect(
        "compilers: operators are looked into outside of graphs",
        "private.set_code_exec_strategy(code, private._FrameExecStrategy(skip, skip))",
        "pass",
        "torch_private",
    ),
    Defect(
        "compilers: the author's forward of a converted module is compiled",
        "return READS_CONVERTED_MODULES or not torch",
        "return not torch",
        "torch_private compiled",
    ),
    Defect(
        "export: operators of the shared engine are exported",
        "return torch.compiler._is_exporting_flag",
        "return False",
        "export",
    ),
    Defect("a layer's kernel sizes the wrong way round", "(1, 3)[-len", "(3, 1)[-len", "parts shared"),
]
