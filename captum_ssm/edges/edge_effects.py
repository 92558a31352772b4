"""Estimate the effects of all messages on an output, and check them with interventions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attr.call import checks
from ..attr.call.inputs import BatchPart, as_tuple, single_input
from ..attr.call.targets import Against, contrasted, require_real_target, target_index
from ..attr.engine.alone import require_alone
from ..attr.engine.fold import verify_layer
from ..attr.engine.linear_method import coefficients, first_that_fits
from ..attr.engine.method import Explainer
from ..attr.engine.run import Question, Request, traced
from ..errors import OptionError
from ..linear import FAMILY
from ..linear.blocks import checkpointed
from ..mixers.base import LinearMixer
from ..tracing import Graph, Layer, Trace, find_mixers, find_model, graphs_dropped, repaired_scans
from ..tracing.observe import observe
from .effects import Effects, LayerEffects
from .pairs import Edges
from .readers import NormCalls, NormReader, Readers
from .truth import Interventions, Truth, sampled


class EdgeEffects(Explainer):
    """Estimated effects of cutting each message between tokens on an output.

    One forward and one backward run estimate the effects for every layer, target and source. By
    default the gradient is the model's own, and norms are recomputed without the message. An effect
    then estimates the true intervention, :func:`~captum_ssm.knock_out`; :meth:`validate` compares
    the two. With ``rule`` the gradient is computed in :class:`~captum_ssm.LatimFlow`'s linear
    network. Then a layer's edges and constants, and the residual stream, sum to the output.

    Args:
        forward_func: the model, wrapped or not, its bound method, or a function that runs it.
        model: the module, if forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers to use. Default: None, all of them.
        rule: a rule of :class:`.LatimFlow`, such as ``"centered"``, or None for the model's own
            gradient. Default: None.
        exact_norms: whether the norms that read a layer's output are recomputed without each
            message, and not approximated to first order. Default: None, True unless ``rule`` is
            passed.
        recompute: keep neither the autograd graph of the model's blocks nor the mixers' operators.
            Blocks run again in the backward pass, and operators are built again, one at a time,
            whenever the result is read. Until then the model's weights must not change. Default:
            None, only after the device's memory was too small without.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or none with an adapter.
        OptionError: for an unknown rule, or one with ``exact_norms``.

    Example:
        >>> import torch
        >>> from captum_ssm import EdgeEffects
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> effects = EdgeEffects(model).attribute(ids, target=(-1, 5))
        >>> tuple(effects.matrix(0).shape), len(effects.top(3)[0])
        ((1, 4, 4), 3)
    """

    needs_gradient = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        model: nn.Module | None = None,
        layers: Sequence[str | nn.Module] | None = None,
        *,
        rule: str | None = None,
        exact_norms: bool | None = None,
        recompute: bool | None = None,
    ) -> None:
        super().__init__(forward_func, model, layers)
        self.rule: Any = None if rule is None else checks.choice("rule", rule, FAMILY)
        if exact_norms is None:
            exact_norms = rule is None
        checks.flags(exact_norms=exact_norms)
        if exact_norms and rule is not None:
            raise OptionError(
                f"rule={rule!r} keeps norms constant; exact_norms=True recomputes them without a "
                "message. Leave one of the two out."
            )
        self.exact_norms = exact_norms
        if recompute is not None:
            checks.flags(recompute=recompute)
        self.recompute = recompute

    def attribute(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        contrast: Any = None,
        verify: bool | float = True,
    ) -> Effects:
        """Estimate the effects of all edges; the result sums and sorts them on request.

        Args:
            inputs: token ids (B, L), embeddings (B, L, E) or images (B, C, H, W); or a tuple of
                one such tensor.
            target: the explained output, in Captum's forms; for outputs (B, L, V) a tuple
                (position, token). Default: None, for models that return one number per example.
            additional_forward_args: further positional arguments of forward_func, for example an
                attention mask. Default: None.
            contrast: the alternative to the target; see :meth:`.LatimFlow.attribute`. Default:
                None.
            verify: check every operator against its module's output; a number is the tolerance.
                Default: True.

        Returns:
            The :class:`Effects`.

        Raises:
            OptionError: for an unknown option.
            InputError, TargetError: for inputs or a target that do not fit, and for layers that
                do not form a chain.
            GradientModeError: when no gradient of the target reaches a layer.
            NonFiniteError: when an operator contains NaN or infinity.
            ReconstructionError: when ``verify`` finds that an operator differs from its module.
        """
        verify = checks.tolerance("verify", verify)
        question = Against(target, contrast)

        def explain(request: Request, _: Sequence[Any], part: BatchPart) -> list[Effects]:
            """Return the effects of the only part, the whole batch, for the only question."""
            request = replace(request, verify=verify is not False)
            run = functools.partial(self._run_once, request, question, verify)
            return [first_that_fits(run, self.recompute)]

        tensor, _ = single_input(inputs)
        ((effects,),) = self._by_parts(tensor, [question], additional_forward_args, None, explain)
        return effects

    def validate(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        edges: Sequence[Edges] | None = None,
        samples: int = 200,
        contrast: Any = None,
        seed: int = 0,
        at_a_time: int = 16,
    ) -> Truth:
        """Cut edges one by one, and compare the true effects with the estimated ones.

        Args:
            inputs, target, additional_forward_args, contrast: as in :meth:`attribute`, with the
                same defaults. For ``contrast="all"`` or ``"others"`` the true effect is on the
                log-probability or the log-odds themselves.
            edges: the edges, each of which is cut separately in all examples. Default: None, single
                edges are sampled from all layers and examples, half in proportion to their effects.
            samples: number of sampled edges. Default: 200.
            seed: the random seed of the sample. Default: 0.
            at_a_time: number of copies of an example that run together. Default: 16.

        Returns:
            The true and the estimated effect of every edge, with their correlation and the share of
            equal signs.

        Raises:
            OptionError: for an option that is not known.
            InputError, TargetError, QueryError: for inputs, a target or edges that do not fit.
        """
        for name, value in (("samples", samples), ("at_a_time", at_a_time)):
            if checks.count(name, value) is None:
                raise OptionError(f"{name}=None is not accepted. Pass an integer of at least 1.")
        tensor, _ = single_input(inputs)
        additional = as_tuple(additional_forward_args)
        effects = self.attribute(tensor, target, additional, contrast=contrast)
        model = find_model(self.forward_func, self.model)
        run = Interventions(
            self.forward_func, model, inputs=tensor, additional=additional, target=target,
            contrast=contrast, at_a_time=at_a_time, tokens=effects.tokens,
        )  # fmt: skip
        with torch.inference_mode(False):
            before = run.numbers().cpu().double()
            # true effects are differences of numbers of this size, with an error of a few units
            rounding = 4 * torch.finfo(effects.output.dtype).eps * float(before.abs().max())
            if edges is None:
                sampled_edges = sampled(effects, samples, checks.integer("seed", seed))
                examples = [example for example, _ in sampled_edges]
                estimated = [edge.effect for _, edge in sampled_edges]
                true = before[examples] - run.of_single(sampled_edges)
                single: list[Any] = [edge for _, edge in sampled_edges]
                return Truth(single, examples, torch.tensor(estimated).double(), true, rounding)
            batch = len(tensor)
            losses = [before - run.numbers(edge).cpu().double() for edge in edges]
            estimates = [effects.of(edge).cpu().double() for edge in edges]
        # one entry for each of the edges and each example
        examples = [example for _ in edges for example in range(batch)]
        repeated = [edge for edge in edges for _ in range(batch)]
        return Truth(repeated, examples, torch.cat(estimates), torch.cat(losses), rounding)

    def _run_once(
        self, request: Request, question: Against, verify: bool | float, recompute: bool
    ) -> Effects:
        """Run the model forward and backward once; return the layers' gradients as Effects.

        With ``recompute`` blocks run again in the backward pass, and operators are not kept.
        """
        by_rule, norm_calls = self.rule is not None, None
        mixers = find_mixers(request.model, request.layers)
        with ExitStack() as stack:
            stack.enter_context(repaired_scans())
            stack.enter_context(graphs_dropped(request.model))
            # with a rule, `coefficients` takes gradients in a second run
            stack.enter_context(torch.set_grad_enabled(not by_rule))
            with ExitStack() as during_run:
                if recompute and not by_rule:
                    during_run.enter_context(checkpointed(request.model, mixers))
                if self.exact_norms:
                    norm_calls = NormCalls(request.model, mixers, during_run)
                graph: Graph = "none" if by_rule else "outputs"
                run = traced(replace(request, graph=graph, operators=not recompute))
            index = target_index(question.target, run.output)
            require_real_target(index, run.output, run.mask)
            if by_rule:
                ((value, gradients),) = coefficients(request, [question], self.rule, recompute)
            else:
                value, _ = contrasted(run.output, question.target, question.contrast)
                # weights are for folds only
                weights = torch.zeros_like(value)
                fold_question = Question(question.target, weights, selected=value)
                outputs = [layer.output for layer in run.layers]
                names = [layer.name for layer in run.layers]
                if recompute:  # blocks run once more, and must find the changes of the first run
                    observe(request.model, mixers, (), stack, gradients=True, vouched=True)
                gradients = replace(run, questions=[fold_question]).gradients(outputs, names)
        layers = []
        norms_of: Sequence[Sequence[NormReader]] = [()] * len(gradients)  # none: first order
        if norm_calls is not None:
            norms_of = norm_calls.of_layers(run.layers, gradients)
        for layer, gradient, norms in zip(run.layers, gradients, norms_of, strict=True):
            verify_layer(layer, verify)
            linear = layer.written
            gradient = layer.in_order(gradient).to(linear.values)
            readers = Readers(layer, norms) if norms else None
            source = functools.partial(_linear_again, run.record, layer) if recompute else linear
            layers.append(LayerEffects(layer.mixer, source, gradient, readers))
        require_alone(run, verify, [(question, value.detach())])
        if request.inputs.dim() == 4:  # an image
            tokens = layers[0].linear.operator.shape.tokens
        else:
            tokens = request.inputs.shape[1]
        return Effects(tuple(layers), mixers, value.detach(), tokens, run.given)


def _linear_again(record: Trace, layer: Layer) -> LinearMixer:
    """Build a layer's linear mixer again; ``record``, held weakly by the layer, caches the last."""
    return layer.written
