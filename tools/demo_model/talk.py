"""Hand-written chats: small talk, questions about Python, and small data conversions."""

from __future__ import annotations

import json
import random

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful coding assistant.",
    "You answer questions about Python.",
    "Answer briefly.",
]

# Each entry has several forms of a question and one answer.
SMALL_TALK: list[tuple[list[str], str]] = [
    (["Hello", "Hi", "Hi!", "hello", "Hello!", "hey", "Good morning"],
     "Hello! How can I help you?"),
    (["How are you?", "How are you today?", "Hi, how are you?"],
     "I am a small program, so I am always the same. How can I help you?"),
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself."],
     "I am the ngramspec demo model, a very small language model that writes Python code. "
     "I make many mistakes."),
    (["What can you do?", "Help", "What can I ask you?", "How can you help me?"],
     "I can write short Python functions, add docstrings and rename variables. "
     "I am very small, so check what I write."),
    (["Thanks!", "Thank you", "thanks", "Thank you very much."], "You are welcome!"),
    (["Bye", "Goodbye", "See you", "bye"], "Goodbye!"),
    (["Tell me a joke.", "Do you know a joke?", "Tell me a joke about Python."],
     "Why did the list go to the doctor? Its index was out of range."),
    (["Write a poem.", "Write a short poem about Python."],
     "A loop goes round, a list grows long,\nthe tests are green, so what is wrong?"),
]  # fmt: skip

QUESTIONS: list[tuple[str, str]] = [
    ("a list comprehension", "A list comprehension builds a list from an iterable in one "
     "expression.\n\n```python\nsquares = [n * n for n in range(10)]\n```"),
    ("a dictionary", "A dictionary maps keys to values.\n\n```python\nages = {\"Ann\": 31, "
     "\"Bob\": 27}\nprint(ages[\"Ann\"])\n```"),
    ("a tuple", "A tuple is an immutable sequence.\n\n```python\n"
     "point = (3, 4)\nx, y = point\n```"),
    ("a set", "A set holds distinct values without order.\n\n```python\nseen = {1, 2, 3}\n"
     "seen.add(2)\n```"),
    ("a generator", "A generator is a function that yields values one at a time.\n\n```python\n"
     "def count(limit):\n    number = 0\n    while number < limit:\n        yield number\n"
     "        number += 1\n```"),
    ("a decorator", "A decorator is a function that takes a function and returns a changed one."
     "\n\n```python\ndef logged(function):\n    def wrapper(*args, **kwargs):\n"
     "        print(function.__name__)\n        return function(*args, **kwargs)\n"
     "    return wrapper\n```"),
    ("a class", "A class describes objects: their data and their methods.\n\n```python\n"
     "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n```"),
    ("a context manager", "A context manager sets something up and cleans it up again, with the "
     "`with` statement.\n\n```python\nwith open(\"data.txt\") as file:\n"
     "    text = file.read()\n```"),
    ("a lambda", "A lambda is a small function without a name.\n\n```python\n"
     "words.sort(key=lambda word: len(word))\n```"),
    ("an exception", "An exception reports an error. It is raised with `raise` and handled with "
     "`try` and `except`.\n\n```python\ntry:\n    number = int(text)\nexcept ValueError:\n"
     "    number = 0\n```"),
    ("a module", "A module is a file with Python code that other files can import.\n\n```python\n"
     "import math\n\nprint(math.pi)\n```"),
    ("a dataclass", "A dataclass is a class whose `__init__` is written for you.\n\n```python\n"
     "from dataclasses import dataclass\n\n\n@dataclass\n"
     "class Point:\n    x: int\n    y: int\n```"),
    ("recursion", "Recursion means that a function calls itself.\n\n```python\n"
     "def factorial(n):\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)\n```"),
    ("an f-string", "An f-string puts the values of expressions into a string.\n\n```python\n"
     "name = \"Ann\"\nprint(f\"Hello, {name}!\")\n```"),
    ("slicing", "Slicing takes a part of a sequence.\n\n```python\nfirst = items[:3]\n"
     "last = items[-3:]\n```"),
    ("an iterator", "An iterator returns the next value each time `next` is called.\n\n```python\n"
     "numbers = iter([1, 2, 3])\nprint(next(numbers))\n```"),
    ("Python", "Python is a programming language. It is easy to read and has a large standard "
     "library."),
    ("the difference between a list and a tuple", "A list can be changed, a tuple cannot.\n\n"
     "```python\nitems = [1, 2, 3]\nitems.append(4)\npoint = (1, 2)\n```"),
]  # fmt: skip

HOW_TO: list[tuple[str, str]] = [
    ("reverse a list", "items = [1, 2, 3]\nitems.reverse()"),
    ("sort a list", "items = [3, 1, 2]\nitems.sort()"),
    ("read a file", 'with open("data.txt") as file:\n    text = file.read()'),
    ("write to a file", 'with open("data.txt", "w") as file:\n    file.write("Hello")'),
    ("reverse a string", 'text = "hello"\nprint(text[::-1])'),
    ("add two numbers", "def add(a, b):\n    return a + b"),
    ("check if a number is even", "def is_even(number):\n    return number % 2 == 0"),
    ("compute the factorial of a number",
     "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n"
     "    return result"),
    ("compute Fibonacci numbers",
     "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
     "    return a"),
    ("find the largest number in a list",
     "def largest(numbers):\n    best = numbers[0]\n    for number in numbers:\n"
     "        if number > best:\n            best = number\n    return best"),
    ("count the words in a text", "def count_words(text):\n    return len(text.split())"),
    ("print the numbers from 1 to 10", "for number in range(1, 11):\n    print(number)"),
    ("check if a number is prime",
     "def is_prime(n):\n    if n < 2:\n        return False\n"
     "    for i in range(2, int(n**0.5) + 1):\n"
     "        if n % i == 0:\n            return False\n    return True"),
    ("parse JSON", "import json\n\ndata = json.loads(text)"),
    ("loop over a dictionary", "for key, value in data.items():\n    print(key, value)"),
    ("merge two dictionaries", "merged = {**first, **second}"),
    ("remove duplicates from a list", "unique = list(dict.fromkeys(items))"),
    ("join a list of strings", 'text = ", ".join(words)'),
    ("get the current date", "from datetime import date\n\nprint(date.today())"),
    ("compute the sum of a list", "def total(numbers):\n    return sum(numbers)"),
    ("check if a string is a palindrome",
     "def is_palindrome(text):\n    return text == text[::-1]"),
    ("compute the greatest common divisor",
     "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    ("search a sorted list",
     "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n"
     "    while low <= high:\n        middle = (low + high) // 2\n"
     "        if items[middle] == target:\n            return middle\n"
     "        if items[middle] < target:\n            low = middle + 1\n"
     "        else:\n            high = middle - 1\n    return -1"),
]  # fmt: skip

FIRST_NAMES = ["Ann", "Bob", "Carla", "David", "Eva", "Frank", "Grace", "Henry", "Ida", "Jack"]
CITIES = ["Berlin", "Paris", "Rome", "London", "Oslo", "Madrid", "Vienna", "Lisbon"]
FRUIT = ["apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "plum", "pear"]


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Return a hand-written message and answer: a greeting, a question about Python or a how-to."""
    kind = rng.random()
    if kind < 0.3:
        questions, answer = rng.choice(SMALL_TALK)
        return rng.choice(questions), answer
    if kind < 0.6:
        topic, answer = rng.choice(QUESTIONS)
        form = rng.choice(["What is {}?", "What is {} in Python?", "Explain {}.", "Explain {} in Python."])
        return form.format(topic), answer
    task, code = rng.choice(HOW_TO)
    form = rng.choice(
        [
            "How do I {} in Python?",
            "How do I {}?",
            "Write Python code to {}.",
            "Show me how to {} in Python.",
            "Write a Python function to {}.",
        ]
    )
    opening = rng.choice(["", "Here is the code:\n\n", "You can do it like this:\n\n"])
    return form.format(task), f"{opening}```python\n{code}\n```"


def data_task(rng: random.Random) -> tuple[str, str]:
    """Return a task on random data and its computed answer: JSON, CSV, sorting or repeating."""
    people = [
        {"name": name, "age": rng.randint(18, 80), "city": rng.choice(CITIES)}
        for name in rng.sample(FIRST_NAMES, rng.randint(1, 5))
    ]
    header = ",".join(people[0])
    csv = "\n".join([header, *(",".join(map(str, person.values())) for person in people)])
    prose = " ".join(f"{p['name']} is {p['age']} and lives in {p['city']}." for p in people)
    block = f"```json\n{json.dumps(people, indent=2)}\n```"
    words = rng.sample(FRUIT, rng.randint(3, 7))
    numbered_list = "\n".join(f"{number}. {word}" for number, word in enumerate(words, 1))
    return rng.choice(
        [
            (f"Convert this to JSON:\n\n{csv}", block),
            (f"Convert this text to JSON: {prose}", block),
            (f"Convert this JSON to CSV:\n\n{json.dumps(people, indent=2)}", csv),
            (f"Sort these words: {', '.join(words)}", ", ".join(sorted(words))),
            (f"Make a numbered list: {', '.join(words)}", numbered_list),
            (f"Repeat these words: {', '.join(words)}", ", ".join(words)),
            (f"Turn this into a Python list: {', '.join(words)}", f"```python\n{words!r}\n```"),
        ]
    )
