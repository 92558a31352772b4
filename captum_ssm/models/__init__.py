"""Models: Vision Mamba and RWKV-7 in plain PyTorch, the small trained ones, and what they read."""

from .bundled import load_bundled, load_dictionary
from .rwkv7 import RWKV7, load_rwkv7
from .sentences import CLASS_WORDS, CLS, TextReader, class_vocabulary, text_words
from .vim import VisionMamba, load_vim, vim_small, vim_tiny
from .vocabulary import WordVocabulary

__all__ = [
    "CLASS_WORDS",
    "CLS",
    "RWKV7",
    "TextReader",
    "VisionMamba",
    "WordVocabulary",
    "class_vocabulary",
    "load_bundled",
    "load_dictionary",
    "load_rwkv7",
    "load_vim",
    "text_words",
    "vim_small",
    "vim_tiny",
]
