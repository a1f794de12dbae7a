// Every kernel on ragged shapes against plain loops, and the decoder on nonsense: for the sanitizers (`make sanitize`).
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "encoder.h"
#include "scatter.h"

using namespace pinscher;

namespace {

std::mt19937 dice(0);
int share = 1;  // of the trials: `check quick` makes one in so many
float normal() { return std::normal_distribution<float>()(dice); }
size_t up_to(size_t most) { return dice() % (most + 1); }

void expect(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

std::vector<float> weights(size_t rows, size_t columns, float density) {
  std::vector<float> made(rows * columns);
  for (float& w : made) w = std::uniform_real_distribution<float>()(dice) < density ? normal() : 0.0f;
  return made;
}

void products(const Kernels& use, Pool& pool) {
  for (int turn = 0; turn < 40; turn += share) {
    const size_t rows = 1 + up_to(280), columns = 1 + up_to(900), tokens = 1 + up_to(200);
    const float densities[] = {0.0f, 0.05f, 0.3f, 1.0f};
    const auto w = weights(rows, columns, densities[turn % 4]);
    std::vector<float> scale(rows, 0.01f), x(tokens * columns), bias(rows), y(tokens * rows);
    std::vector<int8_t> codes(w.size());
    for (size_t i = 0; i < w.size(); ++i) codes[i] = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, w[i] * 40)));
    for (float& v : x) v = normal();
    for (float& v : bias) v = normal();
    for (const Kind kind : KINDS) {
      const bool coded = kind != Kind::f32 && kind != Kind::dense;
      const auto matrix = coded ? matrix_of(codes.data(), scale.data(), rows, columns, kind)
                                : matrix_of(w.data(), rows, columns, kind);
      Team team(pool);
      Activations in, out;
      Operand operand, parts;
      in.shape(tokens, columns);
      to_tiles(team, x.data(), in);
      matrix->form().narrow(team, use, in, operand);
      matrix->multiply(team, use, in, operand, bias.data(), Activation::none, out);
      to_rows(team, out, y.data());
      std::vector<float> one(rows), again(tokens * rows);
      matrix->multiply_one(team, x.data(), bias.data(), one.data());
      matrix->form().make_room(tokens, parts);  // the same form made piece by piece
      for (size_t block = 0; block < blocks(columns, BLOCK_N); ++block) matrix->form().narrow_features(use, in, block, parts);
      matrix->form().settle(team, use, tokens, parts);
      matrix->multiply(team, use, in, parts, bias.data(), Activation::none, out);
      to_rows(team, out, again.data());
      for (size_t t = 0; t < tokens; t += 1 + tokens / 3)
        for (size_t r = 0; r < rows; ++r) {
          double sum = bias[r], size = 1;
          for (size_t k = 0; k < columns; ++k) {
            const double weight = coded ? codes[r * columns + k] * 0.01 : w[r * columns + k];
            sum += weight * x[t * columns + k];
            size += std::abs(weight * x[t * columns + k]);
          }
          const double limit = coded ? 0.05 * std::sqrt(static_cast<double>(columns)) : 1e-5 * size;
          expect(std::abs(y[t * rows + r] - sum) <= limit, "a product");
          expect(std::abs(again[t * rows + r] - sum) <= limit, "a product of what was made piece by piece");
          if (t == 0) expect(std::abs(one[r] - sum) <= 1e-5 * size, "a product of one token");
        }
    }
  }
}

// What a hidden token is does not matter to the others of its row.
void hide_first(const Encoder& made, const Kernels& use, Pool& pool, const std::vector<Row>& rows, size_t tokens,
                std::vector<float> in, const std::vector<float>& wanted) {
  const size_t width = made.width;
  for (size_t s = 0, start = 0; s < rows.size(); start += rows[s++].length)
    if (rows[s].hidden)
      for (size_t k = 0; k < width; ++k) in[start * width + k] = normal();
  std::vector<float> found(tokens * width);
  made.run(pool, use, {tokens, in.data(), {}}, rows, {found.data(), nullptr, false});
  for (size_t s = 0, start = 0; s < rows.size(); start += rows[s++].length)
    for (size_t i = start * width; i < (start + rows[s].length) * width; ++i) {
      const bool asks_only = rows[s].hidden && i < (start + 1) * width;
      if (!asks_only) expect(found[i] == wanted[i], "a hidden token");
    }
}

void encoder(const Kernels& use, Pool& pool) {
  for (size_t width : {21, 24, 45, 96, 384}) {
    if (share > 1 && width > 50) break;
    for (int turn = 0; turn < 10; turn += share) {
      auto linear = [&](size_t rows, size_t columns) {
        const auto w = weights(rows, columns, 0.3f);
        const int many = static_cast<int>(std::size(KINDS)), mixed = 2;  // all matrices are of a kind in turn, or any
        const Kind kind = KINDS[turn % (many + mixed) < many ? turn % (many + mixed) : static_cast<int>(up_to(many - 1))];
        if (kind == Kind::f32 || kind == Kind::dense) return Linear{matrix_of(w.data(), rows, columns, kind), Vector(rows, 0.1f)};
        std::vector<int8_t> codes(w.size());
        for (size_t i = 0; i < w.size(); ++i) codes[i] = static_cast<int8_t>(std::clamp(w[i] * 40, -127.0f, 127.0f));
        const std::vector<float> scale(rows, 0.025f);
        return Linear{matrix_of(codes.data(), scale.data(), rows, columns, kind), Vector(rows, 0.1f)};
      };
      const LayerNorm norm{Vector(width, 1.0f), Vector(width, 0.0f), 1e-5f};
      std::vector<Layer> layers;
      const size_t depth = 1 + up_to(3);
      for (size_t l = 0; l < depth; ++l)
        layers.push_back({linear(3 * width, width), linear(width, width), norm, linear(70, width), linear(width, 70), norm});
      Encoder made(width, 3, Activation::gelu, layers);
      std::vector<float> table(11 * width);
      for (float& v : table) v = normal();
      made.embeddings = {{{table.data(), 11}}, width, norm, {}};
      if (turn % 2) {
        made.reach = 200;
        made.relative.resize(3 * 399 + 64);
        for (float& extra : made.relative) extra = normal();
      }
      std::vector<Row> rows;
      size_t tokens = 0;
      for (size_t s = 0; s < 1 + up_to(4); ++s) {
        const size_t length = 1 + up_to(150);
        rows.push_back({length, length > 1 && s % 2 ? 1 + up_to(40) : 0});
        tokens += length;
      }
      std::vector<int64_t> ids(tokens);
      for (auto& id : ids) id = static_cast<int64_t>(up_to(10));
      std::vector<float> out(tokens * width), every((depth + 1) * tokens * width);
      made.run(pool, use, {tokens, nullptr, {ids.data()}}, rows, {out.data(), every.data(), false});
      std::vector<float> again(tokens * width), firsts(rows.size() * width);
      made.run(pool, use, {tokens, every.data(), {}}, rows, {again.data(), nullptr, false});
      made.run(pool, use, {tokens, every.data(), {}}, rows, {firsts.data(), nullptr, true});
      for (size_t i = 0; i < out.size(); ++i) expect(out[i] == again[i], "an encoder");
      Pool alone(1);  // threads only divide the work
      made.run(alone, use, {tokens, every.data(), {}}, rows, {out.data(), nullptr, false});
      for (size_t i = 0; i < out.size(); ++i) expect(out[i] == again[i], "threads");
      for (size_t s = 0, start = 0; s < rows.size(); start += rows[s++].length)
        for (size_t k = 0; k < width; ++k) expect(firsts[s * width + k] == again[start * width + k], "a first token");
      hide_first(made, use, pool, rows, tokens, every, again);
    }
  }
}

// More callers at once than there are threads or slots, each with steps of all sizes, and rests in which threads fall asleep.
void callers(Pool& pool) {
  std::vector<std::thread> some;
  for (size_t caller = 0; caller < 12; ++caller)
    some.emplace_back([&pool, caller] {
      for (size_t turn = 0; turn < 60; ++turn) {
        Team team(pool);
        std::vector<int> times(1 + (turn * 7 + caller) % 40, 0);
        team.together([&] {
          for (int step = 0; step < 20; ++step) {
            team.each(times.size(), [&](size_t item, size_t thread) {
              expect(thread < team.threads(), "the number of a thread");
              ++times[item];
            });
            for (const int count : times) expect(count == step + 1, "an item is done once, and seen to be done");
          }
        });
        if (turn % 20 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  for (auto& one : some) one.join();
}

// Who has waited for a late thread works alone for a while.
void retreats() {
  using std::chrono::milliseconds;
  Pool hasty(2), patient(2, true);
  for (Pool* pool : {&hasty, &patient}) {
    bool late = false;
    for (int turn = 0; turn < 1000 && !late; ++turn) {
      Team team(*pool);
      std::atomic<bool> slept{false};
      team.each(2, [&](size_t, size_t thread) {
        if (thread) std::this_thread::sleep_for(milliseconds(30));
        if (thread) slept = true;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      });
      late = slept;
    }
    expect(late, "a thread that comes at all");
    expect(Team(*pool).threads() == (pool == &hasty ? 1 : 2), "a retreat");
    std::this_thread::sleep_for(milliseconds(600));
    expect(Team(*pool).threads() == 2, "the end of a retreat");
  }
}

// A child has none of its parent's threads, even if another thread of the parent has the pool at the fork.
void forks(Pool& pool) {
  const auto sum = [&] {
    Team team(pool);
    std::atomic<size_t> total{0};
    for (int turn = 0; turn < 20; ++turn) team.each(50, [&](size_t item, size_t) { total += item; });
    return total.load();
  };
  const size_t wanted = sum();
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) sum();
  });
  for (int turn = 0; turn < 20; ++turn) {
    const pid_t child = fork();
    if (!child) {
      alarm(60);
      const bool fine = sum() == wanted && Team(pool).threads() == pool.threads() && sum() == wanted;
      _exit(fine ? 0 : 1);
    }
    int status = 1;
    expect(child > 0 && waitpid(child, &status, 0) == child && status == 0, "a forked process");
  }
  stop = true;
  busy.join();
}

void attention(const Kernels& use) {
  for (int turn = 0; turn < 60; turn += share) {
    const size_t width = 1 + up_to(70), tokens = 1 + up_to(150), stride = blocks(tokens, TILE) * TILE;
    std::vector<float> q(width * stride), k(width * stride), v(width * stride), out(width * stride), again(width * stride);
    for (auto* some : {&q, &k, &v})
      for (float& x : *some) x = normal();
    std::vector<float> room(attention_room(stride, width)), extra(2 * tokens + 64, 0.3f);
    const float* relative = turn % 2 ? extra.data() : nullptr;
    use.attention(q.data(), k.data(), v.data(), out.data(), stride, tokens, tokens, width, relative, room.data());
    Memory memory;
    memory.shape(tokens, 1, width);
    use.shorten(k.data(), v.data(), stride, width, tokens, memory.head(0, width));
    use.attention_i16(q.data(), memory.head(0, width), again.data(), tokens, tokens, width, relative, room.data());
    for (size_t d = 0; d < width; ++d)
      for (size_t t = 0; t < tokens; ++t)
        expect(std::abs(out[d * stride + t] - again[d * stride + t]) < 0.02f, "attention");
  }
}

void brackets(const Kernels& use) {
  for (int turn = 0; turn < 50; ++turn) {
    std::vector<float> scores(up_to(3000)), inside(scores.size() + 64);
    for (float& s : scores) s = normal();
    size_t above = 0, found = 0, wanted = 0;
    for (const float s : scores) wanted += s > 0 && s <= 0.5f;
    const bool fine = use.bracket(scores.data(), scores.size(), 0, 0.5f, inside.data(), inside.size(), &above, &found);
    expect(fine && found == wanted, "a bracket");
  }
}

void nonsense() {
  for (int turn = 0; turn < 3000; ++turn) {
    const size_t rows = up_to(40), columns = up_to(40);
    std::vector<uint8_t> classes[4];
    for (int side = 0; side < 4; ++side)
      for (size_t i = 0; i < (side % 2 ? columns : rows); ++i) classes[side].push_back(static_cast<uint8_t>(up_to(turn % 9)));
    const Shape shape{rows, columns, classes[0].data(), classes[1].data(), classes[2].data(), classes[3].data()};
    std::vector<std::vector<uint8_t>> gaps(up_to(20));
    std::vector<std::vector<int8_t>> values(up_to(20));
    std::vector<Gaps> mask;
    std::vector<Values<int8_t>> parts;
    for (auto& some : gaps) {
      some.resize(up_to(60));
      for (auto& gap : some) gap = static_cast<uint8_t>(up_to(turn % 2 ? 5 : 255));
      mask.push_back({some.data(), some.size(), 1, up_to(2 * some.size() + 1)});
    }
    for (auto& some : values) {
      some.resize(up_to(60), 3);
      parts.push_back({some.data(), some.size()});
    }
    std::vector<float> scale(rows, 1.0f), out(rows * columns);
    scatter<int8_t, float>(shape, mask, parts, scale.data(), out.data());
  }
}

}  // namespace

#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }  // a child makes threads of its own
#endif

// check [quick] [ISA …]: with fewer trials, and of no other instruction sets than these, each of which must be there.
int main(int count, char** given) {
  std::vector<std::string> wanted(given + 1, given + count);
  if (!wanted.empty() && wanted.front() == "quick") {
    share = 3;
    wanted.erase(wanted.begin());
  }
  for (const std::string& name : wanted) expect(kernels(name.c_str()), "an instruction set that is not there");
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  Pool pool(2, true), three(3, true), alone(1), hasty(3);
  for (const Isa& isa : all_isas()) {
    const Kernels& use = isa.kernels;
    if (!use.supported()) continue;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), use.name) == wanted.end()) continue;
    products(use, pool);
    encoder(use, pool);
    encoder(use, three);
    encoder(use, alone);  // whose share of a wide encoder is large enough to go from products to attention at once
    attention(use);
    brackets(use);
    std::printf("%s: fine\n", use.name);
  }
  callers(pool);
  callers(hasty);
  std::printf("callers: fine\n");
  retreats();
  std::printf("retreats: fine\n");
  forks(pool);
  forks(alone);
  std::printf("forks: fine\n");
  nonsense();
  std::printf("decoding: fine\n");
}
