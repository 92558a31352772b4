"""Errors a user can act on.

Each one is a :class:`CaptumSSMError` and also the builtin that a Captum user would expect to catch.
Messages name the wrong value, the accepted ones, and a remedy.
"""

from __future__ import annotations


class CaptumSSMError(Exception):
    """Base class of every error raised on purpose by captum_ssm.

    Example:
        >>> from captum_ssm import CaptumSSMError, discard_smallest
        >>> try:
        ...     discard_smallest(2.0)
        ... except CaptumSSMError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        OptionError True
    """


class NoMixerError(CaptumSSMError, ValueError):
    """No token mixer was found in the model, or none of them ran.

    The message names supported families, or the mixers that did not run. Register an adapter for a
    custom mixer with :func:`~captum_ssm.register_mixer`.
    """


class UnsupportedMixerError(CaptumSSMError, TypeError):
    """The model holds a token mixer that has no adapter.

    It is refused, since an explanation of the other mixers alone would be wrong.  Register an
    adapter, or vouch for the rest of the model by naming mixers with ``layers``.
    """


class AdapterError(CaptumSSMError, RuntimeError):
    """A mixer's adapter failed, or its result does not describe the mixer.

    The message names the layer, the adapter, the wrong result and the expected one.
    """


class ModelNotFoundError(CaptumSSMError, TypeError):
    """No ``torch.nn.Module`` could be reached from ``forward_func``.

    Pass the module itself, or name it beside the function: ``Method(function, model=module)``.
    """


class InputError(CaptumSSMError, ValueError):
    """The inputs are empty, of mismatched batch sizes, or of an unusable shape.

    Accepted are token ids (B, L), embeddings (B, L, E) and images (B, C, H, W).
    """


class PaddedExampleError(InputError):
    """All tokens of an example are padding, so that there is nothing to attribute to.

    Args:
        example: its number in the batch, counted from 0.

    Example:
        >>> from captum_ssm.errors import PaddedExampleError
        >>> print(PaddedExampleError(2))
        Example 2 of the batch is padding alone: its mask hides every token. Leave it out.
    """

    def __init__(self, example: int) -> None:
        super().__init__(example)
        self.example = example

    def __str__(self) -> str:
        return (
            f"Example {self.example} of the batch is padding alone: its mask hides every token. "
            "Leave it out."
        )


class ArgumentError(CaptumSSMError, TypeError):
    """A function or class is called without an argument that it needs, or with an unknown one.

    The message names the function, and the arguments that it takes.
    """


class OptionError(CaptumSSMError, ValueError):
    """An option has a value that is not accepted; the message lists those that are."""


class LayerError(CaptumSSMError, ValueError):
    """A layer has no activation to explain.

    It is not a module of the model, did not run, ran several times, or is a part of a mixer.
    """


class TargetError(CaptumSSMError, ValueError):
    """The target does not select one number per example.

    Language models take (position, token): of their outputs (B, L, V) an int would be a position.
    """


class QueryError(CaptumSSMError, ValueError):
    """The query is not a token of the sequence: it lies outside, or is padding."""


class OutputError(CaptumSSMError, TypeError):
    """The model returned neither a tensor nor something with logits."""


class GradientModeError(CaptumSSMError, RuntimeError):
    """A gradient is needed where autograd cannot record one.

    Such as under ``torch.inference_mode()``; under ``torch.no_grad()`` methods enable gradients
    themselves.
    """


class TrainingModeError(CaptumSSMError, RuntimeError):
    """A module in training mode is random or reads across the batch; call ``model.eval()``."""


class CheckpointError(CaptumSSMError, ValueError):
    """A file of weights does not fit the model it is loaded into."""


class DataNotFoundError(CaptumSSMError, FileNotFoundError):
    """A file or folder of a data set does not exist."""


class DataError(CaptumSSMError, ValueError):
    """A file of a data set does not have its format."""


class WriteError(CaptumSSMError, OSError):
    """A file or folder cannot be written, such as on a full disk.

    The message names it and the system's error; old files are unchanged.
    """


class WeightsError(CaptumSSMError, RuntimeError):
    """A module's weights are not in memory when they are read, or lack an operation of tensors."""


class CachedStateError(CaptumSSMError, ValueError):
    """The forward pass continued from a cache that the method cannot take apart.

    Pass the whole sequence in one call, without a cache.
    """


class NonFiniteError(CaptumSSMError, ArithmeticError, ValueError):
    """An operator or the explained output holds NaN or infinity.

    The message names the layer and the component, or the target.
    """


class NotLinearError(CaptumSSMError, NotImplementedError):
    """The network uses a function without a known linear form.

    :class:`~captum_ssm.LatimFlow`, :class:`~captum_ssm.LatimLogit` and methods with LRP's rules
    need one; methods of implicit attention do not.
    """


class ReconstructionError(CaptumSSMError, RuntimeError):
    """A linearized mixer does not reproduce the real module's output.

    Raised by ``verify``: the module differs from its adapter.
    """
