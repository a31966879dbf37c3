"""Sentences: many made from parts for the owner, and pairs written by hand to judge a sentence embedding with."""

from __future__ import annotations

import itertools
import random

_WHO = (
    "a farmer|the nurse|my neighbour|an old sailor|the committee|a young engineer|our teacher|the baker|a tired driver"
    "|the orchestra|one of the judges|a stray dog"
).split("|")
_DOES = (
    "waited for|sold|forgot|painted|repaired|argued about|photographed|carried|measured|paid for|lost|borrowed"
).split("|")
_WHAT = (
    "the red bicycle|three boxes of apples|an invoice from last year|the broken window|a map of the coast"
    "|the new timetable|her violin|a bowl of soup|the server in the cellar|two tickets to Lisbon|the garden fence"
    "|a report on water prices"
).split("|")
_WHEN = (
    "on Monday|before the storm|during lunch|in the spring|after the meeting|without saying a word|for the last time"
    "|at the station|while it was raining|although it was late"
).split("|")


def made(count: int, seed: int) -> list[str]:
    """``count`` different sentences."""
    parts = list(itertools.product(_WHO, _DOES, _WHAT, _WHEN))
    return [f"{' '.join(words).capitalize()}." for words in random.Random(seed).sample(parts, count)]


# How alike the two are in meaning, from 0 (nothing in common) to 5 (the same said otherwise).
PAIRS: tuple[tuple[str, str, float], ...] = (
    ("A man is playing the guitar on stage.", "Someone performs on a guitar in front of people.", 4.5),
    ("The cat sleeps on the warm windowsill.", "A kitten is napping by the window.", 4.2),
    ("She bought fresh bread at the bakery.", "At the baker's she got a new loaf.", 4.6),
    ("The train to Berlin was delayed by an hour.", "The Berlin train arrived sixty minutes late.", 4.7),
    ("He is learning how to swim.", "He takes swimming lessons.", 4.3),
    ("The company reported record profits this quarter.", "Quarterly earnings of the firm were the highest ever.", 4.5),
    ("Our flight leaves at six in the morning.", "The plane takes off at 6 a.m.", 4.6),
    ("The doctor prescribed an antibiotic.", "A physician gave him medicine against the infection.", 4.0),
    ("It has not rained for weeks.", "The drought has lasted nearly a month.", 4.0),
    ("The children built a castle out of sand.", "Kids are making a sandcastle.", 4.5),
    ("A woman is slicing onions.", "A woman is cutting vegetables.", 3.8),
    ("The dog chased the ball across the park.", "A dog runs after a stick in the garden.", 3.0),
    ("He repaired the engine of his old car.", "He sold his old car.", 2.2),
    ("The museum opens at nine.", "The museum is closed on Mondays.", 2.4),
    ("I forgot my umbrella at the office.", "She left her keys in the car.", 1.8),
    ("They are painting the house blue.", "They are cleaning the house.", 2.3),
    ("The river flooded the lower town.", "Boats travel along the river.", 1.7),
    ("The teacher explained fractions to the class.", "The pupils are writing an essay.", 1.6),
    ("Tea is grown in the hills of Assam.", "Coffee is exported from Brazil.", 1.8),
    ("The violinist tuned her instrument.", "The audience applauded the singer.", 1.6),
    ("We hiked to the top of the mountain.", "We watched a film about the sea.", 0.8),
    ("The court rejected the appeal.", "The judge bought a new bicycle.", 0.9),
    ("A bird is singing in the tree.", "The stock market fell sharply.", 0.1),
    ("Mix the flour with two eggs.", "The password must have twelve characters.", 0.0),
    ("The bridge was closed for repairs.", "My sister speaks four languages.", 0.1),
    ("He scored the winning goal.", "The volcano has been quiet since 1902.", 0.1),
    ("Snow covered the fields.", "The printer is out of paper.", 0.1),
    ("The lawyer read the contract twice.", "Bananas ripen faster in a paper bag.", 0.0),
    ("She lost her ticket at the station.", "She could not find her train ticket any more.", 4.2),
    ("The old theatre will be torn down.", "They are going to demolish the historic playhouse.", 4.6),
)
