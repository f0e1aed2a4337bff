"""A simulated user who thinks of a number from 1 to 3, and says whether it is higher (+) or lower (-) than a guess."""

from verl.interactions.base import BaseInteraction

NUMBERS = "123"


class HigherLowerInteraction(BaseInteraction):
    """User of the guessing game: the right number scores 1 and ends it, another 0, anything else ``no_guess``.

    Two guesses are enough for who begins with 2 and reads the answer. Who does not read it finds the number in two
    conversations of three.
    """

    async def generate_response(self, instance_id, messages, number, **kwargs):
        guess = messages[-1]["content"].strip()
        if guess == number:
            return True, "", 1.0, {"success": True, "valid_action": True}
        if guess not in tuple(NUMBERS):
            return False, "?", self.config.get("no_guess", -0.1), {"success": False, "valid_action": False}
        return False, "+" if number > guess else "-", 0.0, {"success": False, "valid_action": True}
