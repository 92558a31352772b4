"""The faults, by room.

Old texts are as short as they can be, so that they outlive what is around them.
"""

from __future__ import annotations

from . import Fault

OPERATORS = (
    Fault(
        "a stream's adjoint in the order of the map",
        "ordered = streams if transposed else streams[::-1]",
        "ordered = streams[::-1]",
        ("operators/test_contract.py", "attr/test_folds.py"),
    ),
    Fault(
        "a chain's adjoint in the order of the map",
        "        for part in self.parts:\n            u = part.transpose(u)",
        "        for part in reversed(self.parts):\n            u = part.transpose(u)",
        ("operators/test_compositions.py",),
    ),
    Fault(
        "a short convolution's adjoint looks back",
        "written[earlier].addcmul_(weight, read[later])",
        "written[later].addcmul_(weight, read[earlier])",
        ("operators/test_short_conv.py",),
    ),
    Fault(
        "a long convolution wraps around",
        "size = 1 << (tokens + self.kernel.shape[-1] - 2).bit_length()",
        "size = 1 << (tokens - 1).bit_length()",
        ("operators/test_long_conv.py",),
    ),
    Fault(
        "a long convolution in float32 whatever its kernel",
        "kernel.to(torch.promote_types(kernel.dtype, torch.float32))",
        "kernel.to(torch.float32)",
        ("operators/test_long_conv.py", "operators/test_contract.py"),
    ),
    Fault(
        "a scan's adjoint fades by the step of its own token",
        "after = 1 if self.transposed else 0",
        "after = 0",
        ("operators/test_contract.py",),
    ),
    Fault(
        "heads of a group read vectors in turn",
        "return x[:, :, torch.arange(heads, device=x.device)[part] // each]",
        "return x[:, :, torch.arange(heads, device=x.device)[part] % x.shape[2]]",
        ("operators/test_contract.py",),
    ),
    Fault(
        "gradients of queries that heads share are not summed",
        '"query": self._by_group(',
        '"query": (',
        ("operators/test_contract.py",),
    ),
    Fault(
        "a gated delta rule erases before it decays",
        "erase = key * (self._decays(part) if decays is None else decays)",
        "erase = key",
        ("operators/test_contract.py",),
    ),
    Fault(
        "a reordering of rows undone instead",
        "return matrix.index_select(-2, self.order)",
        "return matrix.index_select(-2, self.inverse)",
        ("operators/test_compositions.py",),
    ),
    Fault(
        "a share of the channels off by one through rounding",
        "dropped = int(ratio * values.shape[-1] + 1e-9)",
        "dropped = int(ratio * values.shape[-1])",
        ("operators/test_reduction.py",),
    ),
    Fault(
        "a chain's constants pass as if they were values",
        "total = part.offset() if total is None else part.affine(total)",
        "total = part.offset() if total is None else part.apply(total)",
        ("operators/test_contract.py",),
    ),
    Fault(
        "a sum's constants: the first alone",
        "return sum_tensors(terms) if terms else None",
        "return terms[0] if terms else None",
        ("operators/test_contract.py",),
    ),
    Fault(
        "chosen heads read the vectors of another group",
        "groups = [head // self._each for head in heads]",
        "groups = [head % self.query.shape[2] for head in heads]",
        ("operators/test_contract.py",),
    ),
    Fault(
        "positions from the end read as the first",
        "return (index % tokens).to(device)",
        "return index.clamp_min(0).to(device)",
        ("operators/test_contract.py",),
    ),
    Fault(
        "heads summed where their mean is asked for",
        "sums_by_head(part, one / per_head, one)",
        "sums_by_head(part, one, one)",
        ("operators/test_contract.py",),
    ),
)

MIXERS = (
    Fault(
        "Mamba: padding not silenced behind the convolution",
        "path.conv(module.conv1d).act(activation_of(module)).silence()\n\n\ndef selective_scan",
        "path.conv(module.conv1d).act(activation_of(module))\n\n\ndef selective_scan",
        ("mixers/test_mamba.py", "attr/test_padding.py"),
    ),
    Fault(
        "a convolution that padding leaks through without this constant",
        "constant = leaked if bias is None else leaked + bias",
        "constant = torch.zeros_like(leaked) if bias is None else bias",
        ("attr/test_padding.py", "mixers/test_mamba.py"),
    ),
    Fault(
        "an activation's ratio is 0 at 0",
        "return torch.where(u == 0, slope, act(u)",
        "return torch.where(u == 0, 0 * slope, act(u)",
        ("mixers/test_mamba.py", "numerics/test_nothing_to_divide.py"),
    ),
    Fault(
        "Mamba-2: steps without their largest value",
        "dt = dt.clamp(*dt_limit)",
        "dt = dt.clamp(dt_limit[0])",
        ("mixers/test_mamba2.py",),
    ),
    Fault(
        "Mamba-2: a norm always behind the gate",
        "        return path.rms_norm(norm.weight, eps, groups).gate(z)\n",
        "        pass\n",
        ("mixers/test_mamba2.py",),
    ),
    Fault(
        "a block's factor on its mixer left out",
        'scale = float(getattr(call.block, "residual_multiplier", 1.0))',
        "scale = 1.0",
        ("mixers/test_mamba2.py",),
    ),
    Fault(
        "an option for negative eigenvalues ignored",
        "(2.0 if module.allow_neg_eigval else 1.0)",
        "1.0",
        ("mixers/test_delta.py",),
    ),
    Fault(
        "a delta rule's queries not scaled",
        "DeltaRule(query * query.shape[-1] ** -0.5, key, beta, log_decay, size)",
        "DeltaRule(query, key, beta, log_decay, size)",
        ("mixers/test_delta.py",),
    ),
    Fault(
        "attention: keys repeated in another order than values",
        "key.repeat_interleave(groups, 1),",
        "key.repeat(1, groups, 1, 1),",
        ("mixers/test_attention.py",),
    ),
    Fault(
        "attention: a window one token short",
        "pairs.tril(window - 1).triu(1 - window)",
        "pairs.tril(window - 2).triu(2 - window)",
        ("mixers/test_attention.py",),
    ),
    Fault(
        "attention: a mask in place of causality",
        "found = real if pairs is None else pairs & real",
        "found = real",
        ("mixers/test_attention.py",),
    ),
    Fault(
        "Vision Mamba: two directions not halved",
        "0.5 if halved else 1.0",
        "1.0",
        ("mixers/test_vim.py",),
    ),
)

TRACING = (
    Fault(
        "hooks stay in the model",
        "return lasting(lambda: register(own, **options).remove)",
        "return lasting(lambda: (register(own, **options), lambda: None)[1])",
        ("tracing/test_hooks.py", "tracing/test_clean.py"),
    ),
    Fault(
        "changes stay if the model fails",
        """    try:
        yield
    finally:
        with _lock:
            _, undo = _lasting.pop(key)
            undo()""",
        """    yield
    with _lock:
        _, undo = _lasting.pop(key)
        undo()""",
        ("tracing/test_hooks.py", "attr/test_results.py"),
    ),
    Fault(
        "hooks hear other threads",
        "return hook(*args) if threading.get_ident() == owner else None",
        "return hook(*args)",
        ("conformance/test_threads.py", "tracing/test_hooks.py"),
    ),
    Fault(
        "gradients stay switched on",
        "stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())",
        "",
        ("tracing/test_clean.py", "attr/test_results.py", "conformance/test_methods.py"),
    ),
    Fault(
        "a model checkpoints in another way from then on",
        "                attributes[name] = held.original",
        "                pass",
        ("tracing/test_gradients.py",),
    ),
    Fault(
        "a block that runs again is given the last of its gradients alone",
        "self._arrived = [plus(*pair) for pair in zip(before, gradients, strict=True)]",
        "self._arrived = [plus(*pair) for pair in zip(gradients, [None] * len(before))]",
        ("linear/test_blocks.py",),
    ),
    Fault(
        "a tensor that enters several blocks counts in the first of them by that one alone",
        "            _add(entered, dict(zip(behind, at_behind, strict=True)))\n",
        "",
        ("linear/test_blocks.py",),
    ),
    Fault(
        "a stream counts as well what the block before made of it",
        "if several or id(x) in self._entered}",
        "if id(x) in self._entered}",
        ("linear/test_blocks.py",),
    ),
    Fault(
        "a block that runs again keeps the graph of its first steps",
        "del network.steps[steps:], mode.ledger.leaves[leaves:]",
        "del mode.ledger.leaves[leaves:]",
        ("linear/test_blocks.py",),
    ),
    Fault(
        "a model keeps the graph of its run",
        "setattr(module, name, tensor.detach())",
        "setattr(module, name, tensor)",
        ("tracing/test_gradients.py", "mixers/test_recurrent.py"),
    ),
    Fault(
        "offloaded weights stay in memory",
        "    stack.callback(hook.post_forward, module, None)\n",
        "",
        ("tracing/test_offload.py",),
    ),
    Fault(
        "an error of NaN passes verification",
        "return error <= limit",
        "return not error > limit",
        ("tracing/test_verification.py",),
    ),
    Fault(
        "sums over tokens held to their own number",
        "return float(_largest(differences, real) / math.sqrt(real.shape[1]))",
        "return float(_largest(differences, real) / real.shape[1])",
        ("tracing/test_verification.py", "attr/test_planted_faults.py"),
    ),
)

LINEAR = (
    Fault(
        "LayerNorm's eps fixed",
        "out = _standardised(x, tuple(range(-len(size), 0)), eps)",
        "out = _standardised(x, tuple(range(-len(size), 0)), 1e-5)",
        ("linear/test_norms.py", "linear/test_rules.py"),
    ),
    Fault(
        "log_softmax: its constant's sign",
        "mode.ledger.record(out, -entropy)",
        "mode.ledger.record(out, entropy)",
        ("linear/test_rules.py", "attr/test_contrast.py"),
    ),
    Fault(
        "batch_norm's shift without the running mean",
        "else bias - mean * scale",
        "else bias",
        ("linear/test_norms.py", "linear/test_rules.py"),
    ),
    Fault(
        "glu's halves exchanged",
        "stream, gate = x.chunk(2, dim)",
        "gate, stream = x.chunk(2, dim)",
        ("linear/test_rules.py",),
    ),
    Fault(
        "a denominator that is not frozen",
        "        denominator = denominator.detach()",
        "        pass",
        ("linear/test_rules.py",),
    ),
    Fault(
        "each factor of a product gets all of it",
        "lambda gradient: gradient / factors",
        "lambda gradient: gradient",
        ("linear/test_network.py", "linear/test_rules.py"),
    ),
    Fault(
        "keys count twice",
        '_ABOVE_MEAN, _AS_IT_IS = Share("rest", 1.0), Share("mean", 0.5),',
        '_ABOVE_MEAN, _AS_IT_IS = Share("rest", 1.0), Share("mean", 1.0),',
        ("linear/test_shares.py", "attr/test_factors.py"),
    ),
    Fault(
        "masks dropped with the biases",
        "return torch.where(constant.abs() < _MASK, constant, torch.zeros_like(constant))",
        "return constant",
        ("linear/test_network.py", "linear/test_mode.py", "attr/test_flow.py"),
    ),
    Fault(
        "a kernel's keys and steps pass gradients",
        "x if name in contents else x.detach()",
        "x",
        ("linear/test_kernels.py",),
    ),
    Fault(
        "the adjoint of a convolution not turned back",
        "return found.flip(-1), None",
        "return found, None",
        ("linear/test_kernels.py",),
    ),
    Fault(
        "a kernel's mean of keys counts padding",
        "running_mean(factor.movedim(dim, 1), mask)",
        "running_mean(factor.movedim(dim, 1), None)",
        ("linear/test_kernels.py", "linear/test_cache.py"),
    ),
    Fault(
        "the states of a cache are coefficients",
        "            start = leaf.clone()  # the model may",
        "            start = leaf.detach().clone()  # the model may",
        ("linear/test_cache.py",),
    ),
    Fault(
        "a call changes the caller's cache",
        "copied(cache, lambda x: x.detach().clone())",
        "cache",
        ("linear/test_cache.py", "attr/test_explained_number.py"),
    ),
    Fault(
        "one token behind a cache is not kept by the state",
        "state = initial_state.to(wide) * decay",
        "state = initial_state.to(wide)",
        ("linear/test_cache.py",),
    ),
    Fault(
        "any kernel may be given a first state",
        "taken = _TAKEN.get(entry, frozenset()) if reading.continues else frozenset()",
        "taken = _TAKEN.get(entry, frozenset())",
        ("linear/test_cache.py", "linear/test_kernels.py"),
    ),
    Fault(
        "a kernel with an unknown backward is trusted",
        "return False  # a kernel without an entry",
        "continue",
        ("linear/test_kernels.py",),
    ),
    Fault(
        "a kernel's keys are steps",
        '    key="k key p B",\n    step="g gk w dt beta s",',
        '    key="key p B",\n    step="g gk w dt beta s k",',
        ("linear/test_kernels.py",),
    ),
    Fault(
        "vectors at length one inside a kernel whose factors share relevance",
        "if reading.mode.divides and given.get(",
        "if not given and given.get(",
        ("linear/test_kernels.py",),
    ),
    Fault(
        "factors of fla that are other functions share relevance",
        "reading.give_up if reading.mode.divides else functools.partial(_vectors, reading)",
        "functools.partial(_vectors, reading)",
        ("linear/test_kernels.py",),
    ),
    Fault(
        "a gate on a kernel rests at one",
        "        if self.mode.is_bent(gate):\n            return 0.0",
        "        if self.mode.is_bent(gate):\n            return 1.0",
        ("linear/test_kernels.py",),
    ),
)

METHODS = (
    Fault(
        "a fold normalizes as if there were a stream",
        "row = row / (has_stream + self.matvec(torch.ones_like(row)))",
        "row = row / (1 + self.matvec(torch.ones_like(row)))",
        ("attr/test_behind_mixers.py",),
    ),
    Fault(
        "start_layer ignored",
        "return layers[self.start_layer :]",
        "return layers",
        ("attr/test_folds.py",),
    ),
    Fault(
        "clamp ignored",
        "return CLAMPS[clamp](strip.entries.mul_(of_rows))",
        'return CLAMPS["relu"](strip.entries.mul_(of_rows))',
        ("attr/test_folds.py",),
    ),
    Fault(
        "the norm of LATIM always of order 2",
        "torch.linalg.vector_norm(tile.vectors, self.p, dim=-1)",
        "torch.linalg.vector_norm(tile.vectors, 2, dim=-1)",
        ("attr/test_latim_norm.py",),
    ),
    Fault(
        "the mean baseline counts padding",
        "        keep = mask.to(root)\n    each = root.flatten(2)",
        "        keep = torch.ones_like(mask).to(root)\n    each = root.flatten(2)",
        ("conformance/test_methods.py", "attr/test_padding.py"),
    ),
    Fault(
        "a batch in parts: every part has the baselines of all",
        "found = decompositions(request, questions, rules, cut(start))",
        "found = decompositions(request, questions, rules, start)",
        ("conformance/test_methods.py",),
    ),
    Fault(
        "a batch in parts: examples counted from each part's first",
        "raise PaddedExampleError(self.part.start + error.example) from None",
        "raise PaddedExampleError(error.example) from None",
        ("attr/test_padding.py",),
    ),
    Fault(
        "a batch in parts: the last examples left out",
        "for start in range(0, batch, size):",
        "for start in range(0, max(1, batch - size), size):",
        ("attr/test_inputs.py", "attr/test_flow.py", "conformance/test_methods.py"),
    ),
    Fault(
        "a batch in parts: every part has the targets of the first",
        "return target[self.part]",
        "return target[: self.part.stop - self.part.start]",
        ("attr/test_inputs.py", "conformance/test_methods.py"),
    ),
    Fault(
        "rule ignored",
        'self.default_rule if rule is None else checks.choice("rule", rule, FAMILY)',
        'self.default_rule if rule is None or checks.choice("rule", rule, FAMILY) else rule',
        ("attr/test_flow.py", "conformance/test_methods.py"),
    ),
    Fault(
        "zero_bias ignored",
        "        checks.flags(zero_bias=zero_bias, **more)",
        "        checks.flags(zero_bias=zero_bias, **more)\n        zero_bias = False",
        ("attr/test_mamba_lrp.py", "conformance/test_methods.py"),
    ),
    Fault(
        "the delta's sign",
        "delta = found.delta + sums.to(found.output)",
        "delta = found.delta - sums.to(found.output)",
        ("attr/test_flow.py", "attr/test_latim_logit.py", "conformance/test_methods.py"),
    ),
    Fault(
        "relevance in float32 whatever the model",
        "return [row.detach() for row in run.laid_out(rows, layout)]",
        "return [row.detach().float() for row in run.laid_out(rows, layout)]",
        ("attr/test_results.py", "conformance/test_methods.py"),
    ),
    Fault(
        "the mean of a query counts padding",
        'query == "mean":\n        return keep',
        'query == "mean":\n        return torch.ones_like(keep)',
        ("attr/test_padding.py", "conformance/test_methods.py"),
    ),
    Fault(
        "the last token may be padding",
        "return (position == last_real(keep)[:, None]) & keep",
        "return position.expand_as(keep) == keep.shape[1] - 1",
        ("attr/test_query.py", "attr/test_padding.py"),
    ),
    Fault(
        "log-odds against all entries, the target's too",
        '    if contrast != "all":\n        scores =',
        '    if contrast == "runner-up":\n        scores =',
        ("attr/test_contrast.py",),
    ),
    Fault(
        "tokens that a function adds count as the first one",
        "kept = torch.where(given >= 0, relevance, torch.zeros_like(relevance))",
        "kept = relevance",
        ("attr/test_tokens_between.py", "attr/test_llm.py"),
    ),
    Fault(
        "spans: a separator's end counts to the span before",
        "bisect_right(begins, start)",
        "bisect_right(begins, start - 1)",
        ("attr/test_answers.py",),
    ),
    Fault(
        "hops: relevance not divided by its own explanation's sum",
        "weights = relevance[some] / number[some]",
        "weights = relevance[some]",
        ("attr/test_answers.py",),
    ),
)

EDGES = (
    Fault(
        "knock_out puts the mean of padding, too, in place",
        "values = linear.values - _mean(linear.values, linear.mask)",
        "values = linear.values - _mean(linear.values, None)",
        ("edges/test_knock_out.py",),
    ),
    Fault(
        "knock_out ignores heads",
        "return found * of_heads(linear, share.heads, layer)",
        "return found",
        ("edges/test_knock_out.py",),
    ),
    Fault(
        "a token counts as later than itself",
        '"later": torch.gt,',
        '"later": torch.ge,',
        ("edges/test_knock_out.py",),
    ),
    Fault(
        "a window of layers one short",
        "min(count, middle + (size + 1) // 2)",
        "min(count, middle + size // 2)",
        ("edges/test_experiments.py",),
    ),
    Fault(
        "strongest edges without those that speak against",
        "key=lambda e: -abs(e.effect)",
        "key=lambda e: -e.effect",
        ("edges/test_effects.py",),
    ),
)

INSIDE = (
    Fault(
        "a layer's output explained in place of its input",
        "return find_site(model, layer, self.layers, at_input=at_input)",
        "return find_site(model, layer, self.layers)",
        ("inside/test_layer.py",),
    ),
    Fault(
        "a neuron may read padded tokens",
        "any(bool((x & ~mask.to(x.device)).any()) for x in read)",
        "any(bool((x & ~mask.to(x.device)).all()) for x in read)",
        ("inside/test_neuron.py",),
    ),
    Fault(
        "a dictionary always subtracts its bias",
        "(x - self.b_dec if self.apply_b_dec_to_input else x)",
        "(x - self.b_dec)",
        ("inside/test_dictionary.py",),
    ),
    Fault(
        "jumprelu without its threshold",
        "(before > self.threshold)",
        "(before > 0)",
        ("inside/test_dictionary.py",),
    ),
    Fault(
        "a graph takes the other graphs off the list",
        '"graphs": [*others, metadata]',
        '"graphs": [metadata]',
        ("inside/test_writers.py",),
    ),
)

METRICS = (
    Fault(
        "average precision breaks ties",
        '    rising = scores.masked_fill(~among, float("-inf")).sort(-1).values\n'
        "    return scores.shape[-1] - torch.searchsorted(rising, scores)",
        "    order = scores.argsort(-1, descending=True, stable=True)\n"
        "    return among.gather(-1, order).cumsum(-1).gather(-1, order.argsort(-1))",
        ("metrics/test_ranking.py",),
    ),
    Fault(
        "equal scores have the lowest of their ranks",
        "    return (below + up_to).double()\n\n\ndef _at_least",
        "    return (below + below).double()\n\n\ndef _at_least",
        ("metrics/test_ranking.py",),
    ),
    Fault(
        "a share of the tokens off by one through rounding",
        "counts = (fractions.to(units.device) * units[:, None] + 1e-9).floor()",
        "counts = (fractions.to(units.device) * units[:, None]).floor()",
        ("metrics/test_image_perturbation.py",),
    ),
    Fault(
        "relevance counts where the mask hides it",
        'scores, _ = masked_scores(relevance, mask, "relevance")\n    positive',
        'scores, _ = masked_scores(relevance, None, "relevance")\n    positive',
        ("metrics/test_faithfulness.py",),
    ),
    Fault(
        "pixels without a label are counted",
        "found.scatter_add_(1, true * classes + given, counts.long())",
        "found.scatter_add_(1, true * classes + given, torch.ones_like(true))",
        ("metrics/test_segmentation.py",),
    ),
)

PAGES = (
    Fault(
        "a page's title is HTML",
        '"title": html.escape(title.encode(errors="backslashreplace").decode()),',
        '"title": title.encode(errors="backslashreplace").decode(),',
        ("viz/html/test_page.py", "viz/html/test_report.py"),
    ),
    Fault(
        "a map's last tokens in no cell",
        "cell = -(-size // _OVERVIEW)",
        "cell = max(1, size // _OVERVIEW)",
        ("viz/html/test_page.py",),
    ),
    Fault(
        "characters that nobody sees are not spelled out",
        "visible = character.isprintable() and ord(character) not in _INVISIBLE",
        "visible = True",
        ("viz/test_pictures.py",),
    ),
    Fault(
        "a report names the token behind the one that is read",
        'f", predicted after token {place[0]}"',
        'f", predicted after token {place[0] + 1}"',
        ("viz/html/test_report.py",),
    ),
    Fault(
        "each picture of a text has the scale of the first",
        "limits = [together or scale(scores) for scores in ends.values()]",
        "limits = [scale(next(iter(ends.values()))) for _ in found]",
        ("viz/test_pictures.py",),
    ),
    Fault(
        "Insights: a page without a server lacks the likeliest class",
        'for score in output.get("predicted", [])[:classes]:',
        'for score in output.get("predicted", [])[1:classes]:',
        ("insights/test_server.py",),
    ),
    Fault(
        "Insights: other sites may ask",
        'if origin is not None and origin not in {f"http://{host}" for host in own}:',
        'if origin is not None and origin in {f"http://{host}" for host in own}:',
        ("insights/test_server.py",),
    ),
    Fault(
        "Insights: any name of the machine will do",
        'if self.headers.get("Host", "") not in own:',
        'if self.headers.get("Host", "") in own - own:',
        ("insights/test_server.py",),
    ),
    Fault(
        "Insights: a token's beginning will do",
        "if not secrets.compare_digest(given.encode(), self.server.token.encode()):",
        "if not self.server.token.startswith(given):",
        ("insights/test_server.py",),
    ),
    Fault(
        "Insights: all networks may connect",
        "super().__init__((_LOOPBACK, port), _Handler)",
        'super().__init__(("", port), _Handler)',
        ("insights/test_server.py",),
    ),
    Fault(
        "Insights: wrong predictions shown as correct ones",
        'return (best.index == actual.index) == (self.prediction == "correct")',
        'return (best.index == actual.index) != (self.prediction == "correct")',
        ("insights/test_methods.py",),
    ),
)

COMMANDS = (
    Fault(
        "files replaced without --force",
        "for file in () if options.force else files:",
        "for file in ():",
        ("cli/test_cli.py", "cli/test_files.py"),
    ),
    Fault(
        "a command that fails ends as if it had not",
        "file=sys.stderr)\n        return 1\n",
        "file=sys.stderr)\n        return 0\n",
        ("cli/test_cli.py",),
    ),
    Fault(
        "models fetched without --hub",
        '"local_files_only": not self.hub',
        '"local_files_only": False',
        ("cli/test_explain.py",),
    ),
    Fault(
        "a model's own code run without being asked",
        '"trust_remote_code": self.trust_remote_code}',
        '"trust_remote_code": True}',
        ("cli/test_explain.py",),
    ),
    Fault(
        "--dtype ignored",
        "            self.model.to(getattr(torch, dtype))",
        "            self.model.to(torch.float32)",
        ("explain/test_loading.py", "cli/test_explain.py"),
    ),
    Fault(
        "a word has the position of the first of its kind",
        "    if len(places) == 1:\n        return places[0]",
        "    if places:\n        return places[0]",
        ("cli/test_knockout.py",),
    ),
    Fault(
        "a failed write leaves half a file",
        "    with replacing(path) as beside:\n        beside.write_bytes(data)",
        "    path.write_bytes(data)",
        ("cli/test_files.py", "conformance/test_processes.py"),
    ),
)

MODELS = (
    Fault(
        "weights read by code that the file brings along",
        'torch.load(path, map_location="cpu", weights_only=True)',
        'torch.load(path, map_location="cpu", weights_only=False)',
        ("models/test_vim.py",),
    ),
    Fault(
        "unknown words read as padding",
        "found = self._ids.get(word, self._ids.get(UNKNOWN))",
        "found = self._ids.get(word, self._ids.get(UNKNOWN, 0))",
        ("cli/test_cli.py", "cli/test_explain.py"),
    ),
    Fault(
        "a bundled model in training mode",
        "    model.load_state_dict(weights, strict=True)\n    return model.eval()",
        "    model.load_state_dict(weights, strict=True)\n    return model",
        ("models/test_bundled_model.py",),
    ),
    Fault(
        "the other strand's complements in another order",
        "table = torch.cat([weight, weight[self.complement_map].flip(-1)], -1)",
        "table = torch.cat([weight, weight[self.complement_map]], -1)",
        ("models/test_dna.py",),
    ),
    Fault(
        "the middle token one place further on",
        '"middle": [patches // 2],',
        '"middle": [(patches + 1) // 2],',
        ("models/test_vim.py",),
    ),
)

FAULTS = (
    *OPERATORS,
    *MIXERS,
    *TRACING,
    *LINEAR,
    *METHODS,
    *EDGES,
    *INSIDE,
    *METRICS,
    *PAGES,
    *COMMANDS,
    *MODELS,
)
