"""Models in plain PyTorch, the small trained model that ships, and word vocabularies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._optional import on_first_use

if TYPE_CHECKING:
    from .bundled import load_bundled, load_dictionary
    from .dna import (
        Caduceus,
        HyenaDNA,
        OneHot,
        StripedHyena,
        load_caduceus,
        load_hyenadna,
        load_striped_hyena,
    )
    from .rwkv7 import RWKV7, load_rwkv7
    from .sentences import CLASS_WORDS, CLS, TextReader, class_vocabulary, text_words
    from .vim import VisionMamba, load_vim, vim_small, vim_tiny
    from .vmamba import VMamba, load_vmamba
    from .vocabulary import WordVocabulary

# Each family of models is imported when one of its names is first used.
__getattr__ = on_first_use(
    __name__,
    {
        "bundled": "load_bundled load_dictionary",
        "dna": "Caduceus HyenaDNA OneHot StripedHyena load_caduceus load_hyenadna "
        "load_striped_hyena",
        "rwkv7": "RWKV7 load_rwkv7",
        "sentences": "CLASS_WORDS CLS TextReader class_vocabulary text_words",
        "vim": "VisionMamba load_vim vim_small vim_tiny",
        "vmamba": "VMamba load_vmamba",
        "vocabulary": "WordVocabulary",
    },
)

__all__ = [
    "CLASS_WORDS",
    "CLS",
    "RWKV7",
    "Caduceus",
    "HyenaDNA",
    "OneHot",
    "StripedHyena",
    "TextReader",
    "VMamba",
    "VisionMamba",
    "WordVocabulary",
    "class_vocabulary",
    "load_bundled",
    "load_caduceus",
    "load_dictionary",
    "load_hyenadna",
    "load_rwkv7",
    "load_striped_hyena",
    "load_vim",
    "load_vmamba",
    "text_words",
    "vim_small",
    "vim_tiny",
]


def __dir__() -> list[str]:
    return sorted(__all__)
