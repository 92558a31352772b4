"""The errors of this package.

Each class is a :class:`CaptumSSMError` and a subclass of a builtin error, as Captum users expect.
Messages name the wrong value, the accepted values, and a remedy.
"""

from __future__ import annotations


class CaptumSSMError(Exception):
    """Base class of all errors of captum_ssm.

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
    """The model has a token mixer without an adapter.

    An explanation without this mixer would be wrong. Register an adapter for the mixer; or pass
    ``layers``, if an explanation of only these layers is enough.
    """


class AdapterError(CaptumSSMError, RuntimeError):
    """A mixer's adapter failed, or its result does not describe the mixer.

    The message names the layer, the adapter, the wrong result and the expected one.
    """


class ModelNotFoundError(CaptumSSMError, TypeError):
    """No ``torch.nn.Module`` was found from ``forward_func``.

    Pass the module itself, or a function and its module: ``Method(function, model=module)``.
    """


class InputError(CaptumSSMError, ValueError):
    """The inputs are empty, have different batch sizes, or have a shape that is not accepted.

    Accepted are token ids (B, L), embeddings (B, L, E) and images (B, C, H, W).
    """


class PaddedExampleError(InputError):
    """All tokens of an example are padding, so no token can have relevance.

    Args:
        example: index of the example in the batch.

    Example:
        >>> from captum_ssm.errors import PaddedExampleError
        >>> print(PaddedExampleError(2))
        Example 2 of the batch has only padding: its mask is 0 at every token. Leave it out.
    """

    def __init__(self, example: int) -> None:
        super().__init__(example)
        self.example = example

    def __str__(self) -> str:
        return (
            f"Example {self.example} of the batch has only padding: its mask is 0 at every token. "
            "Leave it out."
        )


class ArgumentError(CaptumSSMError, TypeError):
    """A required argument of a function or class is missing, or an argument is unknown.

    The message names the function and the accepted arguments.
    """


class OptionError(CaptumSSMError, ValueError):
    """An option has a value that is not accepted; the message lists the accepted values."""


class LayerError(CaptumSSMError, ValueError):
    """A layer has no activation that can be explained.

    The layer is not a module of the model, did not run, ran several times, or is inside a mixer.
    """


class TargetError(CaptumSSMError, ValueError):
    """The target does not select one number per example.

    For the output (B, L, V) of a language model, pass (position, token).
    """


class QueryError(CaptumSSMError, ValueError):
    """The query is not a token of the sequence, or it is a padded token."""


class OutputError(CaptumSSMError, TypeError):
    """The model returned neither a tensor nor an object with the attribute ``logits``."""


class GradientModeError(CaptumSSMError, RuntimeError):
    """A method needs a gradient that autograd cannot compute, as in ``torch.inference_mode()``.

    ``torch.no_grad()`` is accepted, because methods enable gradients.
    """


class TrainingModeError(CaptumSSMError, RuntimeError):
    """A module in training mode is random or mixes examples of the batch; call ``model.eval()``."""


class CheckpointError(CaptumSSMError, ValueError):
    """A model's file is damaged or unsafe to read, or its weights do not fit the model."""


class DataNotFoundError(CaptumSSMError, FileNotFoundError):
    """A file or folder does not exist."""


class DataError(CaptumSSMError, ValueError):
    """A file does not have the expected format."""


class WriteError(CaptumSSMError, OSError):
    """A file or folder cannot be written, such as on a full disk.

    The message names the path and the system's error; old files are unchanged.
    """


class WeightsError(CaptumSSMError, RuntimeError):
    """A module's weights are not in memory."""


class CachedStateError(CaptumSSMError, ValueError):
    """The forward pass continued from a cache whose tokens the method cannot explain.

    Pass the whole sequence in one call, without a cache.
    """


class NonFiniteError(CaptumSSMError, ArithmeticError, ValueError):
    """An operator or the explained output contains NaN or infinity.

    The message names the layer and the component, or the target.
    """


class NotLinearError(CaptumSSMError, NotImplementedError):
    """The network uses a function without a known linear form.

    :class:`~captum_ssm.LatimFlow`, :class:`~captum_ssm.LatimLogit` and methods with LRP rules need
    a linear form; implicit-attention methods do not.
    """


class ReconstructionError(CaptumSSMError, RuntimeError):
    """A linearized mixer, or the explained run, does not reproduce the model's output.

    The option ``verify`` controls this check.
    """
