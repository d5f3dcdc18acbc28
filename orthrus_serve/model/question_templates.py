"""Question frames for training the demo embedder. Data only, and the one function that fills a frame.

The frames ask for a second hop ("the director of …") or compare two things, as multi-hop question sets do, so that the
embedder learns to look for the thing that is named. They were written by hand; no question set was read into them.
"""

import random
import re

PERSON = (
    "Who is {}?",
    "What is {} known for?",
    "When was {} born?",
    "Where was {} born?",
    "When did {} die?",
    "Where did {} die?",
    "Why did {} die?",
    "What nationality is {}?",
    "What was {}'s profession?",
    "Where did {} study?",
    "Where was {} buried?",
    "Who is {}'s father?",
    "Who is the mother of {}?",
    "Who is the spouse of {}?",
    "Who is {}'s sibling?",
    "Who is the child of {}?",
    "Who is the paternal grandfather of {}?",
    "Who is {}'s maternal grandmother?",
    "Who is {}'s father-in-law?",
    "Who is the uncle of {}?",
    "Where was the father of {} born?",
    "When did {}'s mother die?",
    "Where does {}'s wife work at?",
    "What is the place of birth of {}'s husband?",
    "What is the date of death of {}'s father?",
    "What is the cause of death of {}'s spouse?",
)
PERSON_PAIR = (
    "Who was born first, {} or {}?",
    "Who was born later, {} or {}?",
    "Who is older, {} or {}?",
    "Who died first, {} or {}?",
    "Who lived longer, {} or {}?",
    "Do {} and {} have the same nationality?",
    "Are {} and {} of the same nationality?",
    "Were {} and {} born in the same country?",
)
FILM = (
    "Who directed {}?",
    "Who is the director of the film {}?",
    "Where was the director of film {} born?",
    "When was the director of film {} born?",
    "When did the director of film {} die?",
    "What nationality is the director of film {}?",
    "Which country is the director of film {} from?",
    "Where did the director of film {} study?",
    "Which award did the director of film {} win?",
    "Who is the spouse of the director of film {}?",
    "Who is the child of the director of film {}?",
    "What is the cause of death of the director of film {}?",
    "What is the place of birth of the composer of film {}?",
    "When was {} released?",
    "Who starred in {}?",
)
FILM_PAIR = (
    "Which film came out first, {} or {}?",
    "Which film was released more recently, {} or {}?",
    "Which film has the director who was born first, {} or {}?",
    "Which film has the director who died later, {} or {}?",
    "Which film has the director who is older, {} or {}?",
    "Do both films {} and {} have directors from the same country?",
    "Are the directors of {} and {} of the same nationality?",
    "Do {} and {} share the same director?",
)
SONG = (
    "Who performed the song {}?",
    "Where was the performer of song {} born?",
    "What nationality is the composer of song {}?",
    "When did the performer of the album {} die?",
    "Who is the spouse of the singer of {}?",
    "Which country is the performer of song {} from?",
    "When is the birthday of the composer of {}?",
)
SONG_PAIR = (
    "Which song was released first, {} or {}?",
    "Which album came out earlier, {} or {}?",
    "Are {} and {} by the same performer?",
)
WORK = (
    "Who wrote {}?",
    "Who created {}?",
    "When was {} made?",
    "Where was the author of {} educated?",
    "What nationality is the creator of {}?",
    "When did the author of {} die?",
    "What is {} about?",
)
PLACE = (
    "Where is {} located?",
    "What country is {} in?",
    "Which country does {} belong to?",
    "What is {} known for?",
    "How large is {}?",
    "When was {} founded?",
    "Who founded {}?",
)
PLACE_PAIR = (
    "Are {} and {} located in the same country?",
    "Are both {} and {} in the same country?",
    "Which is larger, {} or {}?",
    "Which was established first, {} or {}?",
)
THING = (
    "{}",
    "What is {}?",
    "What does {} mean?",
    "Tell me about {}.",
    "Describe {}.",
    "Explain {}.",
    "What is {} used for?",
    "What is known about {}?",
    "Why is {} important?",
    "When did {} begin?",
    "What is the definition of {}?",
)
THING_PAIR = (
    "What is the difference between {} and {}?",
    "How are {} and {} related?",
    "Which is older, {} or {}?",
)
MENTION = (*PERSON, *FILM, *SONG, *PLACE, "{}", "Tell me about {}.")

SINGLE = {"person": PERSON, "film": FILM, "song": SONG, "work": WORK, "place": PLACE, "thing": THING}
PAIR = {
    "person": PERSON_PAIR,
    "film": FILM_PAIR,
    "song": SONG_PAIR,
    "work": THING_PAIR,
    "place": PLACE_PAIR,
    "thing": THING_PAIR,
}

_DISAMBIGUATOR = re.compile(r"\s*\([^)]*\)$")


def plain_title(title: str) -> str:
    """`Adam Green (filmmaker)` → `Adam Green`."""
    return _DISAMBIGUATOR.sub("", title) or title


def spoken_title(title: str, rng: random.Random) -> str:
    """A title as a question would write it: mostly without its disambiguator, at times with every word in capitals."""
    name = plain_title(title) if rng.random() < 0.7 else title
    return " ".join(word[:1].upper() + word[1:] for word in name.split()) if rng.random() < 0.5 else name


def single_question(family: str, title: str, rng: random.Random) -> str:
    """A question about one thing of `family` (a key of SINGLE)."""
    return rng.choice(SINGLE[family]).format(spoken_title(title, rng))


def pair_question(family: str, title: str, other: str, rng: random.Random) -> str:
    """A question that compares two things of `family`, named in either order."""
    names = [spoken_title(title, rng), spoken_title(other, rng)]
    rng.shuffle(names)
    return rng.choice(PAIR[family]).format(*names)
