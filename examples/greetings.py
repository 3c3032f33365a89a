def hello(name):
    print("Hello, " + name + "!")


def welcome(name):
    print("Welcome to our shop, " + name + "!")


def ask(name):
    print("How are you today, " + name + "?")


def thank(name):
    print("Thank you for your visit, " + name + "!")


def goodbye(name):
    print("Goodbye, " + name + "!")
