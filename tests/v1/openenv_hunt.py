"""An environment of OpenEnv, as an app that OpenEnv's own server makes: find a number."""

from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Hunt(Environment[Guess, Hint, State]):
    def reset(self, seed=None, episode_id=None, secret=0, **others):
        self.secret = secret
        return Hint(text="guess")

    def step(self, action, timeout_s=None, **others):
        is_right = action.number == self.secret
        text = "higher" if action.number < self.secret else "lower"
        return Hint(text=text, done=is_right, reward=1.0 if is_right else -0.25)

    @property
    def state(self):
        return State()


app = create_app(Hunt, Guess, Hint)
