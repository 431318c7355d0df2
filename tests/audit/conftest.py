import sys
from pathlib import Path

tests = Path(__file__).parents[1]
sys.path[:0] = [str(tests), str(tests / "moves"), str(tests / "archive")]
