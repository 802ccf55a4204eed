# docker build -t t5-foundry . && docker run --gpus all -v "$PWD:/data" -w /data t5-foundry fine_tune_t5 --train_file pairs.csv
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
COPY requirements/lock.txt /tmp/lock.txt
RUN pip install --no-cache-dir -r /tmp/lock.txt
COPY . /opt/t5-foundry
RUN pip install --no-cache-dir --no-deps /opt/t5-foundry
CMD ["fine_tune_t5", "--help"]
