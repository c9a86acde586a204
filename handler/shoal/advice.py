# ruff: noqa: E501
"""What a tracker suggests, in English and Korean; the fields in braces are those of `monitoring.Summary`, and `limit`."""

from __future__ import annotations

from typing import Literal

Lang = Literal["en", "ko"]

ADVICE: dict[str, dict[Lang, str]] = {
    "latency": {
        "en": "95% of requests take up to {p95_s:.2f} s (more than {limit:g}): stream the replies, lower the batch limit, or warm up the phrases that come often.",
        "ko": "요청의 95%가 {p95_s:.2f}초까지 걸립니다(기준 {limit:g}초). 스트리밍을 쓰거나, 배치 한도를 낮추거나, 자주 나오는 문장을 미리 준비하세요.",
    },
    "throughput": {
        "en": "{texts_per_s:.2f} texts a second (less than {limit:g}): raise the batch limit while memory allows, and let the codec work beside the language model.",
        "ko": "초당 {texts_per_s:.2f}개 문장입니다(기준 {limit:g}개). 메모리가 허락하는 만큼 배치 한도를 높이고 코덱을 별도로 동작시키세요.",
    },
    "memory": {
        "en": "The GPU's memory is {gpu_share:.0%} full (more than {limit:.0%}): lower the batch limit or the caches, or use int8.",
        "ko": "GPU 메모리를 {gpu_share:.0%} 사용 중입니다(기준 {limit:.0%}). 배치 한도나 캐시를 줄이거나 int8을 쓰세요.",
    },
    "hits": {
        "en": "{hit_rate:.0%} of requests come from the cache (less than {limit:.0%}): enlarge it, warm it up, or leave out seeds where any take will do.",
        "ko": "요청의 {hit_rate:.0%}만 캐시에서 나옵니다(기준 {limit:.0%}). 캐시를 늘리거나, 미리 채우거나, 시드를 고정하지 마세요.",
    },
    "real_time": {
        "en": "A second of sound takes {real_time_factor:.2f} s (more than {limit:g}): listeners wait. Use a GPU, int8, or larger batches.",
        "ko": "소리 1초를 만드는 데 {real_time_factor:.2f}초가 걸립니다(기준 {limit:g}초). GPU나 int8, 더 큰 배치를 쓰세요.",
    },
    "batch": {
        "en": "Batches hold {mean_batch:.1f} requests on average (less than {limit:g}): wait a little longer for company, or send more requests at a time.",
        "ko": "배치에 평균 {mean_batch:.1f}개만 들어 있습니다(기준 {limit:g}개). 조금 더 기다리거나 요청을 더 많이 함께 보내세요.",
    },
    "fine": {
        "en": "Nothing stands out: all figures are within their bounds.",
        "ko": "눈에 띄는 문제가 없습니다. 모든 값이 기준 안에 있습니다.",
    },
}
