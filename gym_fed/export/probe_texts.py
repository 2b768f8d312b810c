"""Texts and token ids on which an export's tokenizer and embeddings are compared with the source's.

A passage of one language contains a few hundred tokens of a vocabulary. These texts contain every added token, tokens
from the whole vocabulary (and thus all of its scripts), and a sentence in each of 24 languages.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

_DRAWN = 512
"""Tokens drawn from the whole vocabulary, at equal distances."""
_TOGETHER = 8
"""Tokens in one text."""
_MAX_ADDED = 4096
"""Maximum added tokens in texts; some vocabularies reserve thousands."""
LANGUAGES = (
    "The mill by the river has stood empty for twenty years, and its wheel no longer turns.",
    "Die Mühle am Fluss steht seit zwanzig Jahren leer; größer als heute war sie nie.",
    "Le moulin près de la rivière est vide depuis vingt ans, l'été on s'y assoit.",
    "El molino junto al río está vacío desde hace veinte años, ¿quién lo recuerda mañana?",
    "O moinho à beira do rio está vazio há vinte anos, e ninguém o pintou de novo.",
    "Il mulino lungo il fiume è vuoto da vent'anni: così com'è, non gira più.",
    "De molen aan de rivier staat al twintig jaar leeg, zo'n grote deur naar het water.",
    "Kvarnen vid ån har stått tom i tjugo år, och hjulet går inte längre.",
    "Młyn nad rzeką stoi pusty od dwudziestu lat, a jego koło już się nie obraca.",
    "Mlýn u řeky je dvacet let prázdný a jeho kolo se už neotáčí.",
    "A folyó melletti malom húsz éve üres, a kereke már nem forog többé.",
    "Nehir kıyısındaki değirmen yirmi yıldır boş, çarkı artık dönmüyor.",
    "Мельница у реки пустует уже двадцать лет, и колесо её больше не вертится.",
    "Млин біля річки стоїть порожній двадцять років, і його колесо не крутиться.",
    "Ο μύλος δίπλα στο ποτάμι είναι άδειος εδώ και είκοσι χρόνια.",
    "הטחנה שליד הנהר עומדת ריקה כבר עשרים שנה, והגלגל אינו מסתובב.",
    "الطاحونة قرب النهر فارغة منذ عشرين سنة، وعجلتها لم تعد تدور.",
    "नदी के किनारे की चक्की बीस साल से खाली है, और उसका पहिया अब नहीं घूमता।",
    "নদীর ধারের কলটি কুড়ি বছর ধরে খালি, চাকা আর ঘোরে না।",
    "โรงสีริมแม่น้ำว่างมายี่สิบปีแล้ว กังหันไม่หมุนอีกต่อไป",
    "Cối xay bên sông đã bỏ trống hai mươi năm, bánh xe không còn quay nữa.",
    "河边的磨坊空了二十年，轮子不再转动。",
    "川のそばの水車小屋は二十年も空いたままで、車輪はもう回らない。",
    "강가의 방앗간은 이십 년째 비어 있고 바퀴는 더 이상 돌지 않는다.",
)
"""One sentence in each language, written for this project."""


def probe_texts(tokenizer: Any) -> list[str]:
    """Return the texts whose token ids are compared, each in NFC, since llama.cpp does not normalise texts.

    An added token is a text by itself, and the end of a word unless it must be a whole word. Nothing follows it, since
    llama.cpp puts a space after special tokens of SentencePiece-style tokenizers, as their chat templates expect.

    Args:
        tokenizer: A ``transformers`` tokenizer.
    """
    texts = [*LANGUAGES, *_of_vocabulary(tokenizer)]
    for token in list(_added(tokenizer).values())[:_MAX_ADDED]:
        texts.append(token.content)
        if not (token.single_word or token.lstrip):
            texts.append(f"mill{token.content}")
    return [text for text in dict.fromkeys(texts) if unicodedata.normalize("NFC", text) == text]


def vocabulary_ids(tokenizer: Any, count: int, *, added: bool = True) -> list[int]:
    """Return at most ``count`` token ids for comparing logits, at equal distances in the vocabulary.

    Args:
        tokenizer: A ``transformers`` tokenizer.
        count: The number of ids; up to half of them are added tokens.
        added: Whether to include added tokens.
    """
    added_ids = _added(tokenizer)
    chosen = _drawn(sorted(added_ids), count // 2) if added else []
    ordinary = [number for number in range(len(tokenizer)) if number not in added_ids]
    return chosen + _drawn(ordinary, count - len(chosen))


def _of_vocabulary(tokenizer: Any) -> Iterator[str]:
    """Yield texts of tokens from all of the vocabulary, without incomplete characters."""
    added = _added(tokenizer)
    ids = [number for number in _drawn(range(len(tokenizer)), _DRAWN) if number not in added]
    for first in range(0, len(ids), _TOGETHER):
        words = (tokenizer.decode([number]) for number in ids[first : first + _TOGETHER])
        text = " ".join(word.strip() for word in words if word.strip() and "\ufffd" not in word)
        if text:
            yield text


def _added(tokenizer: Any) -> dict[int, Any]:
    """Return the added tokens (``AddedToken``) by id."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return added


def _drawn(numbers: Any, count: int) -> list[int]:
    """Return at most ``count`` of the numbers, at equal distances."""
    count = min(len(numbers), max(0, count))
    return [numbers[number * len(numbers) // count] for number in range(count)]
