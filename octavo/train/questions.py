"""Makes questions that people ask from topics and templates, so that a draft head learns answers to
more than the model's own questions."""

from __future__ import annotations

import random

TOPICS = (
    *("photosynthesis", "gravity", "black holes", "the water cycle", "volcanoes", "earthquakes"),
    *("electricity", "magnetism", "the periodic table", "atoms", "DNA", "evolution", "vaccines"),
    *("the immune system", "the human heart", "the brain", "sleep", "vitamins", "protein", "sugar"),
    *(
        "climate change",
        "renewable energy",
        "solar panels",
        "wind turbines",
        "recycling",
        "plastic",
    ),
    *("the Amazon rainforest", "coral reefs", "whales", "bees", "butterflies", "wolves", "dogs"),
    *("horses", "birds", "dinosaurs", "trees", "mushrooms", "roses", "deserts", "rivers", "oceans"),
    *("the Moon", "Mars", "comets", "satellites", "rockets", "telescopes", "the Big Bang", "light"),
    *("sound", "heat", "rust", "glass", "steel", "gold", "water", "salt", "ice", "fire", "wind"),
    *("ancient Rome", "ancient Egypt", "the Middle Ages", "the Renaissance", "the printing press"),
    *("the French Revolution", "the Industrial Revolution", "World War II", "the Cold War"),
    *("democracy", "the United Nations", "human rights", "the stock market", "inflation", "taxes"),
    *("money", "banks", "insurance", "a household budget", "saving money", "a small business"),
    *(
        "marketing",
        "a job interview",
        "a cover letter",
        "public speaking",
        "teamwork",
        "leadership",
    ),
    *("time management", "stress", "meditation", "yoga", "running", "swimming", "cycling", "chess"),
    *("football", "basketball", "tennis", "the Olympic Games", "dancing", "singing", "the piano"),
    *("the guitar", "the violin", "jazz", "opera", "cinema", "theatre", "photography", "painting"),
    *("sculpture", "architecture", "bridges", "skyscrapers", "cathedrals", "museums", "libraries"),
    *(
        "Shakespeare",
        "poetry",
        "novels",
        "fairy tales",
        "mythology",
        "philosophy",
        "ethics",
        "logic",
    ),
    *("mathematics", "algebra", "geometry", "statistics", "probability", "fractions", "infinity"),
    *("computers", "the internet", "artificial intelligence", "machine learning", "robots"),
    *(
        "programming",
        "Python",
        "databases",
        "operating systems",
        "encryption",
        "passwords",
        "email",
    ),
    *("smartphones", "cameras", "batteries", "electric cars", "trains", "aeroplanes", "ships"),
    *("maps", "compasses", "clocks", "calendars", "languages", "spelling", "grammar", "reading"),
    *("teaching", "homework", "a school project", "university", "a good teacher", "curiosity"),
    *("friendship", "family", "love", "honesty", "courage", "patience", "kindness", "happiness"),
    *("bread", "cheese", "coffee", "tea", "chocolate", "rice", "pasta", "soup", "salad", "apples"),
    *("breakfast", "a healthy diet", "a birthday party", "a wedding", "a picnic", "camping"),
    *(
        "gardening",
        "tomatoes",
        "compost",
        "house plants",
        "a vegetable garden",
        "lawns",
        "bicycles",
    ),
    *("Paris", "Tokyo", "New York", "London", "India", "Brazil", "Egypt", "Australia", "Canada"),
    *("the Sahara", "the Alps", "the Nile", "Antarctica", "an island", "a village", "a big city"),
    *("winter", "spring", "rain", "snow", "thunderstorms", "rainbows", "clouds", "the seasons"),
    *("a doctor", "a nurse", "a firefighter", "a farmer", "a carpenter", "an engineer", "a pilot"),
)
TEMPLATES = (
    "What is {}?",
    "What are the most important facts about {}?",
    "Explain {} in simple words.",
    "Explain {} to a ten-year-old.",
    "Can you tell me more about {}?",
    "Tell me something interesting about {}.",
    "Why is {} important?",
    "Why do people care about {}?",
    "How does {} work?",
    "How did {} begin?",
    "What is the history of {}?",
    "Where can I learn about {}?",
    "Give me three ideas for a talk about {}.",
    "Give me five tips about {}.",
    "List the advantages and disadvantages of {}.",
    "What are common mistakes with {}?",
    "What should a beginner know about {}?",
    "Describe {} in one paragraph.",
    "Write a short poem about {}.",
    "Write a short story about {}.",
    "Write a letter to a friend about {}.",
    "Write an introduction for an essay about {}.",
    "Write a quiz with three questions about {}.",
    "Make a plan to learn about {} in a week.",
    "What would happen without {}?",
    "Is it hard to understand {}?",
    "What is the difference between {} and {}?",
    "Compare {} and {}.",
    "How are {} and {} connected?",
    "I am writing about {}. What should I mention?",
    "I have a question: what makes {} special?",
    "Please help me with {}.",
)


def sample_questions(count: int, seed: int) -> list[str]:
    """Return `count` different questions, or fewer if there are not that many."""
    generator = random.Random(seed)
    questions: dict[str, None] = {}
    for _ in range(4 * count):
        template = generator.choice(TEMPLATES)
        topics = generator.sample(TOPICS, template.count("{}"))
        questions[template.format(*topics)] = None
        if len(questions) == count:
            break
    return list(questions)
