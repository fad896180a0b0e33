"""The figures of the paper's tables (Arriola et al., ICLR 2025), by the names of the runs beside them."""

# Tables 3 and 4, test perplexity: LM1B after 65B tokens, OpenWebText after 524B. All but AR are bounds.
LM1B = {
    "ar": 22.83,
    "d3pm": 82.34,
    "sedd": 32.68,
    "mdlm": 31.78,
    "bd3lm-16": 30.60,
    "bd3lm-8": 29.83,
    "bd3lm-4": 28.23,
}
OPENWEBTEXT = {
    "ar": 17.54,
    "sedd": 24.10,
    "mdlm": 22.98,
    "bd3lm-16": 22.27,
    "bd3lm-8": 21.68,
    "bd3lm-4": 20.73,
}

# Table 5, zero-shot perplexity; its PubMed and arXiv stand beside other papers of biology and computing.
ZERO_SHOT = {
    "ar": (81.07, 25.32, 51.14, 52.13, 52.11, 48.59, 41.22),
    "sedd": (96.33, 35.98, 68.14, 48.93, 67.82, 45.39, 40.03),
    "mdlm": (90.96, 33.22, 64.94, 48.29, 62.78, 43.13, 37.89),
    "bd3lm-4": (96.81, 31.31, 60.88, 50.03, 61.67, 42.52, 39.20),
}

# Table 1, blocks of one token after 16B tokens of LM1B.
CASE_STUDY = {"ar": 22.88, "ar-random-batch": 24.37, "block-1": 25.56, "block-1-full": 22.88}
# Section 4.2: the variance of the loss of blocks of one, with times drawn uniformly and fully masked.
CASE_VARIANCE = {"linear U[0, 1]": 1.52, "fully masked": 0.11}

# Table 2, (perplexity, variance) by block size and mask range; its whole context is 128 tokens.
RANGES = {
    (None, 0.0, 0.5): (31.72, 1.03),
    (None, 0.3, 0.8): (31.78, 1.35),
    (None, 0.5, 1.0): (31.92, 1.83),
    (None, 0.0, 1.0): (31.78, 3.80),
    (16, 0.0, 0.5): (31.27, 7.90),
    (16, 0.3, 0.8): (31.19, 3.62),
    (16, 0.5, 1.0): (31.29, 3.63),
    (16, 0.0, 1.0): (31.33, 7.39),
    (4, 0.0, 0.5): (29.23, 32.68),
    (4, 0.3, 0.8): (29.37, 10.39),
    (4, 0.5, 1.0): (29.16, 8.28),
    (4, 0.0, 1.0): (29.23, 23.65),
}

# Table 8, (perplexity, variance) by the run of ours.
SCHEDULES = {
    "range-4-0.45-0.95": (29.21, 6.24),
    "range-4-0.3-0.8": (29.38, 10.33),
    "range-4-0-1": (30.18, 23.45),
    "schedule-4-logarithmic": (30.36, 23.53),
    "schedule-4-square_root": (31.41, 26.43),
    "range-16-0.45-0.95": (31.42, 3.60),
    "range-16-0.3-0.8": (31.12, 3.58),
    "range-16-0-1": (31.72, 7.62),
    "schedule-16-square": (31.43, 13.03),
    "schedule-16-cosine": (31.41, 13.00),
}

# The best mask range by block size (Table 8).
CLIPS = {4: (0.45, 0.95), 16: (0.3, 0.8)}

# Table 6, (median, longest) document in tokens, OpenWebText, and of its training set.
LENGTHS = {"ar": (4008, 131_000), "sedd": (1021, 1024), "bd3lm-16": (798, 9982)}
TRAINING_LENGTHS = (717, 131_000)

# Table 7, generative perplexity under GPT2-Large at one and two contexts of 1,024.
GENERATIVE = {
    "ar": (14.1, 13.2),
    "sedd": (52.0, None),
    "mdlm": (46.8, 41.3),
    "bd3lm-16": (33.4, 31.5),
    "bd3lm-8": (30.4, 28.2),
    "bd3lm-4": (25.7, 23.6),
}
SSD_LM = {1000: (37.2, 35.3), 25: (281.3, 281.9)}  # by steps a block
