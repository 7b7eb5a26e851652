"""Whether two mathematical answers are the same one, decided exactly; see `equality.same_answer` for the rules.

spelling: one spelling of what LaTeX and plain text write in many.  arithmetic, calculus, expressions: text -> sympy, strictly.
units: what follows a number.  reading: text -> numbers, lists, tuples, sets, equations, words.
equality: the comparison.  Nothing here imports the rest of the package: a grading worker loads it alone.
"""
