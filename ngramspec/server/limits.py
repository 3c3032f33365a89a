"""Limits on requests and responses, so that no client makes the others wait, or fills the memory."""

MAX_VALUES = 400_000  # values in JSON, because Python keeps its lock, and the other requests wait, while it is parsed
MAX_DIGITS = 1000  # digits of a whole number in JSON; the time to read them grows with the square
MAX_ITEMS = 10_000  # objects in a list: messages, parts of a message, tools
MAX_STRINGS = 1024  # strings in a list, such as stop strings
MAX_CHARACTERS = 16_384  # characters of such a list
MAX_CHOICES = 100_000  # strings in `guided_choice`
MAX_TOKENS = 65_536  # tokens in `logit_bias` and `stop_token_ids`
MAX_TEXT = 1_000_000  # characters to tokenize
MAX_ANSWERS = 128  # answers of a request, as at OpenAI
MAX_ALTERNATIVES = 20  # alternatives in the logprobs of a token, as at OpenAI
MAX_LOGPROBS = 10_000  # alternatives in a response with more than `MAX_ALTERNATIVES` of them for each token
MAX_SCORED = 2**22  # log-probabilities of prompts in a response; each takes about 100 bytes until it is sent
MAX_NUMBERS = 2**23  # numbers of embeddings in a response
MAX_MARKDOWN = 100_000  # characters of a text that the page renders; a longer one remains plain text
MAX_HIGHLIGHTED = 50_000  # characters of highlighted code
MAX_MESSAGE = 2000  # characters of an error message, which may quote a request or a model file
MAX_PATH = 100  # characters of a path in the log
MAX_EVENTS = 64  # events of a request that are read before other clients have a turn
LARGE_JSON = 65_536  # bytes from which the JSON of a request is read on a thread, which lets the loop run
MAX_SENT = 2**20  # characters of a response, which are ASCII, from which they are sent, so that no large text is copied
