"""The eight tools of MiniMind's data, with the fixed replies that the references in these data expect. The
replies about weather, time and money are invented. A random number is a function of its bounds.

    python -m trainer.rollouts.mock_tools > data/tool_cases.jsonl

writes eight questions with their tools and the references of right answers, for --eval_data_path."""

import hashlib
import json
from typing import Any

from trainer.rollouts.environments import Call, calculate, tool_message

DEFAULT_ZONE = "Asia/Shanghai"
TIMES = {  # one moment
    "Asia/Shanghai": "2025-03-07 14:30:00",
    "Asia/Tokyo": "2025-03-07 15:30:00",
    "Australia/Sydney": "2025-03-07 17:30:00",
    "Europe/London": "2025-03-07 06:30:00",
    "Europe/Paris": "2025-03-07 07:30:00",
    "America/New_York": "2025-03-07 01:30:00",
}
WEATHER = {  # degrees Celsius, and the sky
    "上海": (15, "多云"),
    "北京": (28, "晴"),
    "南京": (20, "晴"),
    "广州": (32, "闷热"),
    "成都": (18, "小雨"),
    "杭州": (22, "阴"),
    "武汉": (25, "多云"),
    "深圳": (30, "晴"),
    "西安": (16, "大风"),
    "重庆": (26, "阴"),
    "London": (5, "小雨"),
    "New York": (8, "多云"),
    "Paris": (10, "阴"),
    "Sydney": (25, "晴朗"),
    "Tokyo": (12, "晴"),
}
USUAL_WEATHER = (22, "晴")
RATES = {
    ("USD", "CNY"): 7.21,
    ("EUR", "CNY"): 7.85,
    ("GBP", "CNY"): 9.12,
    ("AUD", "CNY"): 4.72,
    ("JPY", "CNY"): 0.048,
    ("CNY", "JPY"): 20.83,
    ("USD", "EUR"): 0.92,
    ("USD", "GBP"): 0.79,
}
FACTORS = {
    ("km", "miles"): 0.621371,
    ("miles", "km"): 1.60934,
    ("kg", "pounds"): 2.20462,
    ("pounds", "kg"): 0.453592,
    ("meters", "feet"): 3.28084,
    ("feet", "meters"): 0.3048,
    ("celsius", "fahrenheit"): 1.8,  # of a difference, as in these data
    ("fahrenheit", "celsius"): 0.5556,
}
TRANSLATIONS = {
    ("你好世界", "english"): "Hello World",
    ("今天天气真好", "english"): "The weather is nice today",
    ("机器学习很有趣", "english"): "Machine learning is interesting",
    ("Good morning", "chinese"): "早上好",
    ("Happy birthday", "chinese"): "生日快乐",
    ("I love programming", "chinese"): "我喜欢编程",
}


def math_result(arguments: dict) -> dict[str, Any]:
    """The value of `expression`."""
    return {"result": calculate(str(arguments["expression"]))}


def time_of(arguments: dict) -> dict[str, Any]:
    """The time in `timezone`."""
    zone = arguments.get("timezone") or DEFAULT_ZONE
    return {"datetime": TIMES.get(zone, TIMES[DEFAULT_ZONE]), "timezone": zone}


def number_between(arguments: dict) -> dict[str, Any]:
    """A whole number from `min` to `max`."""
    low, high = int(arguments.get("min", 0)), int(arguments.get("max", 100))
    if low > high:
        raise ValueError(f"min {low} is above max {high}")
    digest = hashlib.blake2b(f"{low} {high}".encode(), digest_size=8).digest()
    return {"result": low + int.from_bytes(digest, "little") % (high - low + 1)}


def length_of(arguments: dict) -> dict[str, Any]:
    """Characters and words of `text`."""
    text = str(arguments["text"])
    return {"characters": len(text), "words": len(text.split())}


def converted(arguments: dict) -> dict[str, Any]:
    """`value` of `from_unit` in `to_unit`."""
    units = str(arguments["from_unit"]).lower(), str(arguments["to_unit"]).lower()
    if units not in FACTORS:
        raise ValueError(f"{units[0]} cannot be converted to {units[1]}")
    return {"result": round(float(arguments["value"]) * FACTORS[units], 4)}


def weather_in(arguments: dict) -> dict[str, Any]:
    """The weather in `location`."""
    degrees, sky = WEATHER.get(arguments["location"], USUAL_WEATHER)
    return {"city": arguments["location"], "temperature": f"{degrees}°C", "condition": sky}


def rate_of(arguments: dict) -> dict[str, Any]:
    """The value of one `from_currency` in `to_currency`."""
    pair = arguments["from_currency"], arguments["to_currency"]
    return {"from": pair[0], "to": pair[1], "rate": RATES.get(pair, 1.0)}


def translated(arguments: dict) -> dict[str, Any]:
    """`text` in `target_language`; an unknown text is returned unchanged."""
    text, language = arguments["text"], str(arguments["target_language"]).lower()
    return {"translated_text": TRANSLATIONS.get((text, language), text)}


def schema(name: str, about: str, needed: str, optional: str = "", numbers: str = "") -> dict:
    """The JSON schema of a tool. Its parameters are texts, except for those named in `numbers`."""
    properties = {
        each: {"type": "number" if each in numbers.split() else "string"}
        for each in [*needed.split(), *optional.split()]
    }
    parameters = {"type": "object", "properties": properties, "required": needed.split()}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [
    schema("calculate_math", "计算一个算式的值", "expression"),
    schema("get_current_time", "查询某个时区现在的时间", "", "timezone"),
    schema("random_number", "在两个整数之间取一个随机数", "", "min max", "min max"),
    schema("text_length", "统计一段文字的字符数和单词数", "text"),
    schema("unit_converter", "把数值换算成另一种单位", "value from_unit to_unit", "", "value"),
    schema("get_current_weather", "查询一座城市的天气", "location"),
    schema("get_exchange_rate", "查询两种货币的汇率", "from_currency to_currency"),
    schema("translate_text", "把文字翻译成另一种语言", "text target_language"),
]
FUNCTIONS = {
    "calculate_math": math_result,
    "get_current_time": time_of,
    "random_number": number_between,
    "text_length": length_of,
    "unit_converter": converted,
    "get_current_weather": weather_in,
    "get_exchange_rate": rate_of,
    "translate_text": translated,
}


class MockTools:
    """All eight tools. If a record names some of them, only those are offered."""

    answers = tuple(FUNCTIONS)
    tools = TOOLS

    def __init__(self, record: dict):
        pass

    def reply(self, calls: list[Call]) -> list[dict]:
        """The reply of each tool, or an error message."""
        return [tool_message(self._answer(call)) for call in calls]

    @staticmethod
    def _answer(call: Call) -> Any:
        if call["name"] not in FUNCTIONS:
            return {"error": f"no tool named {call['name']}"}
        try:
            return FUNCTIONS[call["name"]](call["arguments"])
        except KeyError as error:
            return {"error": f"{call['name']} needs {error.args[0]}"}
        except (ValueError, TypeError, OverflowError) as error:
            return {"error": str(error)}


def cases() -> list[dict[str, Any]]:
    """Eight questions as records, each with its tools and one reference for each call that is needed."""
    number = number_between({"min": 1, "max": 50})["result"]
    rows: list[tuple[str, str, list[Any]]] = [
        ("计算 37 乘以 24 再加 15", "calculate_math text_length", [903]),
        ("现在是几点？", "get_current_time random_number", ["14:30"]),
        ("5 英里等于多少公里？", "unit_converter calculate_math", [8.0467]),
        ("取一个 1 到 50 之间的随机数，再算它的两倍", "random_number calculate_math", [number, 2 * number]),
        ("上海今天的天气怎么样？", "get_current_weather get_current_time", [15]),
        ("1 欧元能换多少人民币？", "get_exchange_rate unit_converter", [7.85]),
        ("把“机器学习很有趣”翻译成英文", "translate_text text_length", ["Machine learning is interesting"]),
        (
            'How many words are in "the quick brown fox"? And how warm is it in London?',
            "text_length get_current_weather get_current_time",
            [4, 5],
        ),
    ]
    by_name = {tool["function"]["name"]: tool for tool in TOOLS}
    records = []
    for question, offered, references in rows:
        tools = [by_name[name] for name in offered.split()]
        records.append({"prompt": question, "tools": tools, "gt": [str(each) for each in references]})
    return records


if __name__ == "__main__":
    for case in cases():
        print(json.dumps(case, ensure_ascii=False))
