from dataclasses import dataclass, field
@dataclass
class Judgement:
    refusals: tuple = ()
    lifted: tuple = ()
    dropped: dict = field(default_factory=dict)
def judge(*a, **k):
    return Judgement()
