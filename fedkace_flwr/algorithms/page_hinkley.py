"""Page and Hinkley's test: whether a device's accuracy has fallen.

The test sums how far each round's accuracy lies below the mean of the rounds before, less an allowance, never below
zero, and gives an alarm when the sum passes a limit (Page, "Continuous Inspection Schemes", Biometrika 1954; Hinkley,
"Inference about the Change-Point from Cumulative Sum Tests", Biometrika 1971). Rounds of an inbox have few samples or
many, and streams are smooth or not. So distances are in units of the spread that a round's accuracy has anyway, and
mean and spread follow the stream slowly: what gets harder little by little gives no alarm.

What the constants amount to, in simulated rounds of a device with an accuracy of 80 %
(``tests/algorithms/test_page_hinkley.py`` repeats them): without a fall, less than one false alarm in 30,000 rounds; after
a sudden fall, an alarm as follows.

=======  ====================  ====================
fall     10 samples a round    50 samples a round
=======  ====================  ====================
to 60 %  3 of 4, in 14 rounds  all, in 4 rounds
to 40 %  all, in 5 rounds      all, in 3 rounds
to 20 %  all, in 3 rounds      all, in 3 rounds
=======  ====================  ====================
"""

from dataclasses import dataclass

_ALLOWANCE = 0.5  # spreads below the mean in each round that count for nothing: the test looks for falls of twice that
_LIMIT = 8.0  # spreads
_MOST = 4.0  # spreads that one round counts for: a single odd round gives no alarm, three do
_FIRST = 10  # rounds without a verdict, since mean and spread are not known yet
_MEMORY = 20  # rounds that mean and spread are over, roughly
_LEAST = 0.05  # spread, however steady the stream has been
_EDGE = 0.2  # the spread of few samples is computed for a mean at least so far from 0 and 1, near which it is skewed


@dataclass
class PageHinkley:
    """The test of one stream of accuracies; its fields are its state.

    Attributes
    ----------
    rounds : int
        Rounds so far, since the last alarm.
    mean, variance : float
        Of the accuracy in the last rounds.
    fallen : float
        The sum.
    before : float
        The mean when the sum was last zero.
    """

    rounds: int = 0
    mean: float = 0.0
    variance: float = 0.0
    fallen: float = 0.0
    before: float = 0.0

    def add(self, accuracy: float, samples: int) -> bool:
        """Take a round's accuracy on a number of samples; True gives an alarm, with which the test begins anew."""
        alarm = False
        if self.rounds >= _FIRST:
            middle = min(max(self.mean, _EDGE), 1 - _EDGE)
            spread = max(self.variance, middle * (1 - middle) / samples, _LEAST**2) ** 0.5
            below = min((self.mean - accuracy) / spread, _MOST)
            self.fallen = max(0.0, self.fallen + below - _ALLOWANCE)
            alarm = self.fallen > _LIMIT
        if alarm:
            self.rounds, self.mean, self.variance, self.fallen = 0, 0.0, 0.0, 0.0
        self.rounds += 1
        share = 1 / min(self.rounds, _MEMORY)
        moved = accuracy - self.mean
        self.mean += share * moved
        self.variance = (1 - share) * (self.variance + share * moved**2)
        if not self.fallen and not alarm:
            self.before = self.mean
        return alarm
