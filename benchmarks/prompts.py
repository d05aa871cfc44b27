"""Varied prompts of stated lengths: several languages and scripts, code, numbers, emoji. Deterministic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, islice

TEXTS = {
    "english": (
        "The lighthouse keeper wrote down the weather four times a day, and on most days the four lines "
        "said the same thing. On the last evening of October the wind turned to the north, the glass fell, "
        "and he"
    ),
    "german": (
        "Zwischen den beiden Bahnhöfen liegt ein Park, in dem mittags die Angestellten ihr Brot essen. Wer "
        "dort länger sitzt, hört die Züge, lange bevor man sie sieht, und weiß bald, welcher von ihnen"
    ),
    "french": (
        "À l'heure où le marché ferme, les marchands vident leurs cageots et baissent leurs prix. Une "
        "vieille dame choisit trois pêches, les paie sans un mot, puis demande pourquoi"
    ),
    "spanish": (
        "El río cambia de nombre al cruzar la frontera, pero los pescadores de ambas orillas usan las "
        "mismas redes y cuentan las mismas historias. ¿Quién podría decir dónde empieza"
    ),
    "polish": (
        "Zegar na wieży spieszy się o siedem minut, dlatego mieszkańcy miasteczka nigdy nie spóźniają się "
        "na pociąg. Żaden zegarmistrz nie odważył się go"
    ),
    "russian": "Зимой озеро замерзает так быстро, что рыбаки не успевают убрать лодки. Весной дети ищут под ними",
    "greek": "Το καΐκι έφυγε πριν ξημερώσει, φορτωμένο με λεμόνια και ελιές. Όταν γύρισε το βράδυ,",
    "arabic": "في السوق القديم يعرف الناس بعضهم بعضا من أصواتهم قبل وجوههم، ولذلك عندما دخل الغريب",
    "hindi": "पहाड़ के उस पार एक छोटा सा गाँव है जहाँ हर घर की छत पर मक्का सूखता है। एक दिन",
    "chinese": "城里最老的书店只在下雨天开门。店主说,晴天的人不需要书,他们需要的是",
    "japanese": "駅前の喫茶店では、いつも同じ席に同じ客が座っている。ある朝、その席に",
    "korean": "할머니는 매일 아침 강가에서 물소리를 들으며 편지를 쓰셨다. 그 편지는",
    "python": (
        "def running_median(values: list[float], width: int) -> list[float]:\n    window = "
        "SortedList()\n    medians = []\n    for i, value in enumerate(values):\n        "
        "window.add(value)\n        if i >= width:\n            "
    ),
    "c": (
        "static int parse_header(const uint8_t *buf, size_t len, struct header *out)\n{\n\tif (len < "
        "sizeof(*out))\n\t\treturn -EINVAL;\n\tout->version = buf[0] >> 4;\n\t"
    ),
    "sql": (
        "SELECT c.name, COUNT(*) AS orders, SUM(o.total) FROM customers c JOIN orders o ON o.customer_id = "
        "c.id\nWHERE o.placed_at >= '2024-01-01'\nGROUP BY"
    ),
    "json": ('{"id": 4711, "tags": ["red", "späť", null], "position": {"lat": 52.5163, "lon": 13.3777}, "history": ['),
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, ",
    "emoji": 'Our trip in one line: ✈️🏝️🐢🍍🌧️☔️🏨🃏☀️🤿🐠🎉 and then 👩‍👩‍👧‍👦 said: "🇳🇿 next year?" 😅',
    "chat": "<|im_start|>user\nName three rivers in Europe, one per line.<|im_end|>\n<|im_start|>assistant\n",
    "spaces": "name      qty    price\n---------------------------\nbolt  \t  12  \t  0.40\nnut   \t  30  \t ",
}

SHORT = (1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 28, 30, 31, 32, 33, 36, 40)
MEDIUM = (44, 47, 48, 50, 56, 60, 61, 62, 63, 64, 65, 70, 80, 90, 100, 110, 120, 126, 127, 128, 129, 140, 160, 180)
LONG = (200, 244, 246, 248, 250, 255, 256, 257, 511, 513, 2000)
LENGTHS = (*SHORT, *MEDIUM, *LONG)


def make_prompts(encode: Callable[[str], list[int]], lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """A prompt of each of the lengths in tokens. Neighbours begin with different texts; long ones mix all of them."""
    names = list(TEXTS)
    return [_prompt(encode, names[i % len(names) :] + names[: i % len(names)], n) for i, n in enumerate(lengths)]


def _prompt(encode: Callable[[str], list[int]], names: list[str], num_tokens: int) -> list[int]:
    pieces: list[str] = []
    token_ids: list[int] = []
    for number, name in enumerate(islice(cycle(names), 1 + num_tokens)):
        pieces.append(TEXTS[name] if not number else f"\n\n{number}. {TEXTS[name]}")
        token_ids = encode("".join(pieces))
        if len(token_ids) >= num_tokens:
            break
    # The end of the text, so that what is continued is rarely a word cut in two.
    return token_ids[-num_tokens:]
