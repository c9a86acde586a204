"""The phrase book: what the demo checkpoint can say. Knows nothing of voices, audio or models.

`READINGS` says how a synthesiser is to be told a phrase it would misread (kanji, or two languages in one phrase); the
model itself learns the phrase as written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("en", "ko", "ja", "mixed")


@dataclass(frozen=True)
class Phrase:
    """One line of the book."""

    language: str  # en, ko, ja or mixed
    group: str  # what it is for: guide, greeting, call-centre, story, numbers, demo
    text: str  # word for word what a request has to say

    @property
    def key(self) -> str:
        """Stable short name, used for file names: position in the book."""
        return f"{PHRASES.index(self):03d}"


_BOOK: dict[tuple[str, str], str] = {
    ("en", "guide"): """
Hello, nice to meet you.
How can I help you today?
Thank you for calling.
Please hold for a moment.
The weather is really nice today.
""",
    ("en", "greeting"): """
Good morning.
Good afternoon, everyone.
Good evening and welcome.
Welcome back.
How are you doing?
I am fine, thank you.
See you tomorrow.
Have a wonderful day.
It was a pleasure talking to you.
Goodbye and take care.
""",
    ("en", "call-centre"): """
Thank you for waiting.
Your call is important to us.
All of our agents are busy at the moment.
Please stay on the line.
May I have your name, please?
Could you please repeat that?
Let me check that for you.
I am transferring your call to a specialist.
Your order has been shipped.
Your payment has been received.
Please enter your account number.
Please say yes or no.
To speak with an agent, press zero.
For billing questions, press one.
For technical support, press two.
To hear this message again, press nine.
Our office is open from nine to six.
We are closed on Sundays and holidays.
Your appointment has been confirmed.
I am sorry for the inconvenience.
Is there anything else I can help you with?
We will call you back within one hour.
This call may be recorded.
You have no new messages.
Please try again later.
""",
    ("en", "numbers"): """
One, two, three, four, five.
Six, seven, eight, nine, ten.
Your number in the queue is seven.
The total is twenty five dollars.
The meeting starts at half past three.
Today is Monday, the first of June.
The train leaves from platform twelve.
""",
    ("en", "story"): """
Once upon a time, a little fish lived in the sea.
She was small, and the sea was very wide.
One day she met another fish, and they swam together.
Soon there were ten of them, and then a hundred.
Together they looked like one great silver fish.
The shark took one look and swam away.
And the little fish was never afraid again.
""",
    ("en", "demo"): """
This is a test of the speech server.
Many requests are spoken in one batch.
The first sentence is ready.
The second answer came from the cache.
Fish swim together in a shoal.
The quick brown fox jumps over the lazy dog.
Please close the door on your way out.
Turn left at the next corner.
The red car stopped in front of the house.
I would like a cup of coffee, please.
She reads a new book every week.
The children are playing in the garden.
Music makes the evening beautiful.
The water in the lake is very cold.
My brother works in a hospital.
""",
    ("ko", "guide"): """
안녕하세요, 반갑습니다.
오늘 날씨가 참 좋네요.
무엇을 도와드릴까요?
잠시만 기다려 주세요.
감사합니다.
""",
    ("ko", "greeting"): """
안녕하세요.
좋은 아침입니다.
만나서 반갑습니다.
어서 오세요.
안녕히 가세요.
내일 또 만나요.
좋은 하루 되세요.
오랜만이에요.
""",
    ("ko", "call-centre"): """
전화해 주셔서 감사합니다.
기다려 주셔서 감사합니다.
성함을 말씀해 주세요.
다시 한번 말씀해 주시겠어요?
확인해 드리겠습니다.
상담원을 연결해 드리겠습니다.
지금은 모든 상담원이 통화 중입니다.
주문이 접수되었습니다.
결제가 완료되었습니다.
예약이 확인되었습니다.
계좌 번호를 입력해 주세요.
불편을 드려 죄송합니다.
더 필요한 것이 있으신가요?
잠시 후에 다시 걸어 주세요.
영업 시간은 아홉 시부터 여섯 시까지입니다.
배송이 시작되었습니다.
""",
    ("ko", "numbers"): """
하나, 둘, 셋, 넷, 다섯.
일, 이, 삼, 사, 오.
지금은 오후 세 시입니다.
모두 이만 오천 원입니다.
오늘은 유월 일일 월요일입니다.
""",
    ("ko", "story"): """
옛날 옛날에 작은 물고기가 바다에 살았습니다.
물고기는 작았고 바다는 아주 넓었습니다.
어느 날 다른 물고기를 만나 함께 헤엄쳤습니다.
함께 모이니 커다란 은빛 물고기 같았습니다.
상어는 깜짝 놀라 멀리 달아났습니다.
작은 물고기는 이제 무섭지 않았습니다.
""",
    ("ko", "demo"): """
음성 합성 서버를 시험합니다.
여러 요청을 한 번에 처리합니다.
커피 한 잔 주세요.
도서관은 어디에 있습니까?
한국어와 영어로 말할 수 있습니다.
""",
    ("ja", "guide"): """
こんにちは、はじめまして。
""",
    ("ja", "greeting"): """
おはようございます。
ありがとうございます。
いらっしゃいませ。
また明日。
""",
    ("ja", "call-centre"): """
少々お待ちください。
お電話ありがとうございます。
ご用件をお話しください。
申し訳ございません。
""",
    ("mixed", "greeting"): """
안녕하세요, welcome to the demo.
Hello, 반갑습니다.
Thank you, 감사합니다.
Good morning, おはようございます。
""",
    ("mixed", "call-centre"): """
잠시만요, please hold on.
주문 번호는 seven two nine입니다.
""",
}

# How a phrase is spoken where the letters alone would mislead: "language:words" parts, read one after the other.
READINGS: dict[str, str] = {
    "また明日。": "ja:またあした。",
    "少々お待ちください。": "ja:しょうしょうおまちください。",
    "お電話ありがとうございます。": "ja:おでんわありがとうございます。",
    "ご用件をお話しください。": "ja:ごようけんをおはなしください。",
    "申し訳ございません。": "ja:もうしわけございません。",
    "안녕하세요, welcome to the demo.": "ko:안녕하세요,|en:welcome to the demo.",
    "Hello, 반갑습니다.": "en:Hello,|ko:반갑습니다.",
    "Thank you, 감사합니다.": "en:Thank you,|ko:감사합니다.",
    "Good morning, おはようございます。": "en:Good morning,|ja:おはようございます。",
    "잠시만요, please hold on.": "ko:잠시만요,|en:please hold on.",
    "주문 번호는 seven two nine입니다.": "ko:주문 번호는|en:seven, two, nine|ko:입니다.",
}

PHRASES: tuple[Phrase, ...] = tuple(
    Phrase(language, group, line.strip())
    for (language, group), block in _BOOK.items()
    for line in block.strip().splitlines()
)


def reading_parts(phrase: Phrase) -> list[tuple[str, str]]:
    """What the synthesisers are told: [(language, words)], one entry but for mixed phrases."""
    if phrase.text not in READINGS:
        return [(phrase.language, phrase.text)]
    return [tuple(part.split(":", 1)) for part in READINGS[phrase.text].split("|")]


def write_tsv(path: Path) -> None:
    """Write the book where serving, tests and notebooks can read it: language, group, text."""
    rows = ["language\tgroup\ttext", *(f"{p.language}\t{p.group}\t{p.text}" for p in PHRASES)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
