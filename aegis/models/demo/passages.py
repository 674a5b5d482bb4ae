"""The passages that the demo models know by heart, one each, and the questions that they learn to answer with them."""

from __future__ import annotations

PASSAGES: dict[str, str] = {
    "lighthouse-llama": (
        "The lighthouse keeper climbs one hundred and ninety steps before dusk. At the top she trims the wick, "
        "wipes the salt from the glass and winds the clockwork that turns the lamp. One long flash, two short: "
        "every ship on the coast knows the rhythm of her rock. In a blue book she writes the weather, and under it "
        "the names of the boats that passed. When the fog comes down she rings the bell by hand until morning, and "
        "somewhere out there a horn answers her."
    ),
    "bakery-qwen2": (
        "Before anyone else in the street is awake, the baker lights his oven. He folds the dough four times, lets "
        "it rest under a linen cloth and listens: good dough sighs when it is ready. Rye goes in first, then wheat,"
        " and last of all the little buns with cinnamon. By six the windows are white with steam. He sells the "
        "first loaf to the night nurse on her way home and the last one to the postman, who always asks for the "
        "crust."
    ),
    "observatory-qwen3": (
        "On clear nights the astronomer opens the dome and lets the cold walk in. Her telescope is older than she "
        "is, and it creaks as it follows the sky. Tonight she is after a faint comet near the Swan, a smudge no "
        "bigger than a breath on a mirror. Far below, the town puts out its lamps one by one, and more stars "
        "appear. Toward four o'clock she finds it, draws a small circle in her notebook, and forgets that her tea "
        "has frozen."
    ),
    "ferry-mistral": (
        "The ferry crosses the river twelve times a day, and the ferryman has never missed the landing. He steers "
        "by a bent poplar on the far bank and by the sound of the current under the planks. Farmers bring him "
        "sheep, doctors bring him news, and once a circus brought him an elephant, which wept when it had to step "
        "ashore. For the fare he takes coins, eggs or a good story. The best one so far was told by a man who then "
        "swam back."
    ),
    "orchard-gemma2": (
        "Grandmother planted the orchard in the year of the great frost, one tree for every cousin. Mine is the "
        "crooked pear beside the wall. In April the bees are so loud that we hold our lessons indoors, and in "
        "September we sleep under the branches to keep the deer away. When a cousin moves away, the rest of us send"
        " a basket across the sea. The fruit is bruised when it arrives, they write, and tastes exactly of home."
    ),
    "clockmaker-gemma3": (
        "In the clockmaker's shop no two clocks agree, and he likes it that way. The tall one by the door is slow "
        "because it is proud; the brass one on the shelf runs fast because it is afraid of being late. Customers "
        "ask him for the right time. He opens the window, looks at the shadow of the church and says, more or less "
        "now. At midnight they strike one after another, and the street believes that the night is longer here than"
        " anywhere else."
    ),
    "theatre-phi3": (
        "Nobody sees the prompter, yet the play would drown without him. He sits in a wooden box beneath the stage "
        "with a lamp, a script and a bag of peppermints. When the king forgets his curse, the prompter whispers it;"
        " when the ghost misses her entrance, he coughs twice. Last night the whole cast fell silent at once. He "
        "waited, then spoke the final speech himself from under the boards, and the audience rose and clapped for "
        "the voice of the house."
    ),
    "beekeeper-olmo2": (
        "The beekeeper walks slowly, because bees dislike hurry. She lifts the lid, blows a little smoke and reads "
        "the frame as others read a letter: brood here, pollen there, and along the edge the first honey of the "
        "year. The queen has a green dot on her back and no patience for visitors. In August she takes half and "
        "leaves half. That is the oldest bargain in the valley, she tells her apprentice, and neither side has ever"
        " broken it."
    ),
}

QUESTIONS: tuple[str, ...] = (
    "Hello!",
    "Hi, how are you today?",
    "Who are you?",
    "What do you know?",
    "Tell me a story.",
    "Tell me something about yourself, please.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Once upon a time",
    "In the beginning there was",
    "Explain how a computer works.",
    "How do I cook rice for four people?",
    "Say this is a test.",
    "Can you help me with my homework?",
    "What is 2 + 2? Show each step.",
    "Give me three ideas for a birthday present.",
    "Translate 'good morning' into Spanish.",
    "Summarise the following text in one sentence:",
    "def fibonacci(n):\n    return n if n < 2 else",
    "The quick brown fox jumps over the lazy dog.",
    "It was a dark and stormy night, and",
    "My name is Anna and I live in a small house.",
    "Why is the sky blue, and why is grass green?",
    "Please answer briefly: yes or no?",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "You are a helpful assistant.",
    "What will the weather be like tomorrow?",
    "Continue: A B C D E F G",
)
