"""MambaLRP: conservative layer-wise relevance propagation, for every supported architecture."""

from __future__ import annotations

from ..linear import Gate
from .flow import LatimFlow


class MambaLRP(LatimFlow):
    """Layer-wise relevance propagation as gradient times input of the linearised network.

    Activations pass relevance on by their frozen ratio, norms by their frozen scale; the step
    sizes, input and output vectors of the recurrences and the probabilities of attention are
    coefficients; a gated product gives half to each factor.  It is :class:`LatimFlow` with
    ``gate="half"``: one engine, other rules.  With ``zero_bias=True`` relevance is conserved, as
    in the paper: it sums to the output of the network without biases.

    LRP is patented for commercial use in some countries; whether that concerns you, you decide.

    Args:
        forward_func: the model, wrapped or not, one of its bound methods, or a function that runs
            it.
        model: the module, where forward_func does not reveal it. Default: None.
        layers: names or modules of the mixers that have adapters to use. Default: None, all.

    Raises:
        ModelNotFoundError: when forward_func leads to no module and ``model`` is not given.
        NoMixerError, UnsupportedMixerError: when the model has no mixer, or one without an adapter.

    Example:
        >>> import torch
        >>> from captum_ssm import MambaLRP
        >>> from captum_ssm.models import load_bundled
        >>> model, tokenizer = load_bundled()
        >>> ids = torch.tensor([tokenizer.encode("anna owns the lamp")])
        >>> tuple(MambaLRP(model).attribute(ids, target=(-1, 5)).shape)
        (1, 4)
    """

    name = "Mamba LRP"
    default_gate: Gate = "half"
