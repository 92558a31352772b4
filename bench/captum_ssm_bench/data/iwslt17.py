"""IWSLT17's talks (Cettolo et al. 2017): development and test sets, a file for each language.

``IWSLT17.TED.tst2015.de-en.de.xml`` holds the sentences of its language in ``<seg>`` elements, in
the same order as the file of the other language.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from captum_ssm._files import existing_file
from captum_ssm.errors import DataError


def load_iwslt17(source: str | Path, target: str | Path) -> list[tuple[str, str]]:
    """Sentences and their translations.

    Args:
        source: the file of the source language.
        target: that of the other one, of the same set.

    Returns:
        The pairs in the files' order.

    Raises:
        DataNotFoundError: when one of the files does not exist.
        DataError: when one is not such a file, or the two do not have equally many sentences.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from captum_ssm_bench.data import load_iwslt17
        >>> form = '<mteval><srcset><doc><seg id="1"> {} </seg></doc></srcset></mteval>'
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = [Path(folder, f"tst.de-en.{language}.xml") for language in ("de", "en")]
        ...     for file, text in zip(files, ("Danke .", "Thanks .")):
        ...         _ = file.write_text(form.format(text))
        ...     load_iwslt17(*files)
        [('Danke .', 'Thanks .')]
    """
    texts = [sentences_of(path) for path in (source, target)]
    if len(texts[0]) != len(texts[1]):
        raise DataError(
            f"{source} has {len(texts[0])} sentences, {target} {len(texts[1])}: each needs its "
            "translation."
        )
    return list(zip(*texts, strict=True))


def sentences_of(path: str | Path) -> list[str]:
    """The sentences of one language.

    Args:
        path: the file.
    """
    found = existing_file(path, "a file of IWSLT17, such as IWSLT17.TED.tst2015.de-en.de.xml")
    try:
        root = ElementTree.parse(found).getroot()
    except (ElementTree.ParseError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{found} is not XML ({error}).") from None
    texts = ["".join(segment.itertext()).strip() for segment in root.iter("seg")]
    if not texts:
        raise DataError(f"{found} holds no <seg>: is it a file of IWSLT17's sentences?")
    return texts
