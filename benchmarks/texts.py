"""What the guide's tables say: a hundred texts, call-centre prompts, an audiobook, five languages."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path


def _list(lines: str) -> list[str]:
    return lines.split("|")


CALL_CENTRE = _list(
    "Thank you for calling.|Please hold the line.|All our lines are busy at the moment.|"
    "Your call is important to us.|You are number three in the queue.|The waiting time is about five minutes.|"
    "Press one for sales.|Press two for support.|Press three to hear your balance.|"
    "Press zero to speak to a person.|Please enter your customer number.|I did not understand that.|"
    "Please say yes or no.|Please try again.|One moment, please.|I will connect you now.|"
    "This call may be recorded.|Our office is closed today.|We are open from nine to five.|"
    "Please call again tomorrow.|Your order has been shipped.|Your parcel arrives on Monday.|"
    "Your payment has been received.|Your card has been blocked.|A new card is on its way.|"
    "Your password has been changed.|Please check your email.|We have sent you a message.|"
    "Your appointment is confirmed.|Your appointment is at half past ten.|Would you like another date?|"
    "Your ticket has been closed.|A technician will call you back.|Please restart your device.|"
    "Is there anything else?|Thank you for your patience.|We are sorry for the delay.|"
    "Your refund has been approved.|The amount is twenty dollars.|Please leave a message after the tone.|"
    "Your message has been saved.|You have two new messages.|You have no new messages.|Press star to go back.|"
    "Press the hash key to finish.|Your contract ends in June.|Would you like to renew it?|"
    "Your data is safe with us.|Have a nice day.|Goodbye."
)

LANGUAGES = {
    "en": _list(
        "Good morning.|How are you today?|The weather is fine.|I would like a coffee.|Where is the station?|"
        "The train leaves at noon.|Please open the window.|This book is very good.|We met last summer.|"
        "She sings every evening.|The children play outside.|Can you help me?|I have two brothers.|"
        "The shop is closed.|Turn left at the corner.|Dinner is ready.|It is getting late.|See you tomorrow.|"
        "Take care of yourself.|Good night."
    ),
    "ko": _list(
        "좋은 아침입니다.|오늘 기분이 어떠세요?|날씨가 참 좋네요.|커피 한 잔 주세요.|역이 어디에 있나요?|"
        "기차는 정오에 떠납니다.|창문을 열어 주세요.|이 책은 아주 재미있어요.|우리는 지난여름에 만났어요.|"
        "그녀는 매일 저녁 노래해요.|아이들이 밖에서 놀아요.|도와주실 수 있나요?|저는 형제가 두 명 있어요.|"
        "가게 문이 닫혔어요.|모퉁이에서 왼쪽으로 도세요.|저녁이 준비됐어요.|시간이 늦었네요.|내일 만나요.|"
        "몸조심하세요.|안녕히 주무세요."
    ),
    "ja": _list(
        "おはようございます。|お元気ですか。|いい天気ですね。|コーヒーをください。|駅はどこですか。|"
        "電車は正午に出ます。|窓を開けてください。|この本はとても面白いです。|去年の夏に会いました。|"
        "彼女は毎晩歌います。|子供たちは外で遊びます。|手伝ってもらえますか。|兄弟が二人います。|"
        "店は閉まっています。|角を左に曲がってください。|夕食ができました。|もう遅いですね。|また明日。|"
        "お大事に。|おやすみなさい。"
    ),
    "zh": _list(
        "早上好。|你今天好吗?|天气很好。|我想要一杯咖啡。|车站在哪里?|火车中午出发。|请打开窗户。|这本书很好看。|"
        "我们去年夏天见过。|她每天晚上唱歌。|孩子们在外面玩。|你能帮我吗?|我有两个兄弟。|商店关门了。|"
        "在拐角处左转。|晚饭好了。|时间不早了。|明天见。|请多保重。|晚安。"
    ),
    "es": _list(
        "Buenos días.|¿Cómo estás hoy?|Hace buen tiempo.|Quiero un café.|¿Dónde está la estación?|"
        "El tren sale a mediodía.|Abre la ventana, por favor.|Este libro es muy bueno.|"
        "Nos vimos el verano pasado.|Ella canta todas las noches.|Los niños juegan fuera.|¿Puedes ayudarme?|"
        "Tengo dos hermanos.|La tienda está cerrada.|Gira a la izquierda en la esquina.|La cena está lista.|"
        "Se hace tarde.|Hasta mañana.|Cuídate mucho.|Buenas noches."
    ),
}

_WHO = _list("the fish|a small crab|the old turtle|the silver shoal|one gull|the lonely whale|a young seal")
_WHAT = _list("swam on|turned around|waited quietly|told a story|looked up|heard a song|found a shell|crossed the bay")
_WHERE = _list("under the moon|near the reef|before the storm|in the deep|by the harbour|at first light|after the rain")


def book(sentences: int) -> list[str]:
    """A story, a sentence each, all of them different: up to 392."""
    told = itertools.product(_WHERE, _WHO, _WHAT)
    lines = [f"{where.capitalize()}, {who} {what}." for where, who, what in told]
    return random.Random(1).sample(lines, min(sentences, len(lines)))


def workloads(checkpoint: Path, texts: int) -> dict[str, list[str]]:
    """The guide's workloads by name, all texts distinct: the hundred, then its three scenarios.

    A demo checkpoint with a phrase book knows those phrases and babbles elsewhere, so its hundred come from there.

    Args:
        texts: so many instead of 100; the scenarios shrink with it.
    """
    share = texts / 100
    languages = [line for group in zip(*LANGUAGES.values(), strict=True) for line in group]
    hundred = languages
    if (checkpoint / "phrases.tsv").is_file():
        with (checkpoint / "phrases.tsv").open(encoding="utf-8") as file:
            known = [row["text"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
        hundred = list(dict.fromkeys(known))
    all_of_them = {
        "100 texts": (hundred, 100),
        "50 call-centre prompts": (CALL_CENTRE, 50),
        "10-minute audiobook": (book(392), 260),
        "5 languages x 20": (languages, 100),
    }
    return {name: lines[: max(4, round(most * share))] for name, (lines, most) in all_of_them.items()}


def repeated(texts: list[str], exponent: float, seed: int = 0) -> list[str]:
    """As many requests as there are texts, drawn from the first quarter of them by Zipf's law."""
    phrases = texts[: max(2, len(texts) // 4)]
    weights = [1 / rank**exponent for rank in range(1, len(phrases) + 1)]
    return random.Random(seed).choices(phrases, weights, k=len(texts))
