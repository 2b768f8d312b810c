"""Ask the variant, by openai's client: what `gym api` printed, with a question of one's own."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none-needed")
answer = client.chat.completions.create(
    model="gym-nano:me", messages=[{"role": "user", "content": "shout: dxec"}], max_tokens=64
)
print(answer.choices[0].message.content)
