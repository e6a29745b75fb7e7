// The planner's searches: what they return is allowed, costs what its sums say, is no worse than the start, and is the
// same each time.
extern "C" {
#include "../../src/rowwise/planning/planner/_c/plan.h"
}

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "fuzz.h"

namespace {

typedef std::vector<int32_t> Ints;
typedef std::vector<double> Floats;

constexpr double CLOSE = 1e-6;  // sums in another order round otherwise

class Placing {
 public:
  // What bytes decide comes first, and amounts last: those are the same after the end of an input.
  explicit Placing(Bytes& bytes) : bytes_(bytes), effort_(draw_effort(bytes)) {
    p_.hosts = int32_t(bytes.next(1, 4)), p_.devices = int32_t(bytes.next(1, 4));
    p_.loads = int32_t(bytes.next(1, 6)), p_.tiers = int32_t(bytes.next(1, MAX_TIERS));
    world_ = p_.hosts * p_.devices, units_ = world_ + p_.hosts + 1;
    measure_ = int32_t(bytes.next(0, 2)), homed_ = bytes.flip(), halves_ = bytes.flip(3);
    effort_.bytes_price = homed_ && bytes.flip() ? 1e-6 : 0;
    link_limit_ = bytes.flip(4) ? bytes.positive() : 1e300;
    for (int32_t end = 0; end < p_.loads;) {
      end = int32_t(bytes.next(end + 1, p_.loads));
      static const double powers[] = {1, 2, 6, 16, 1.5};
      group_end_.push_back(end), group_power_.push_back(powers[bytes.next(0, 4)]);
    }
    p_.groups = int32_t(group_end_.size());
    item_begin_ = option_begin_ = {0};
    p_.items = int32_t(bytes.next(1, 6));
    for (int32_t i = 0; i < p_.items; ++i) {
      for (int64_t options = bytes.next(1, 3); options-- > 0;) add_option(i);
      item_begin_.push_back(int32_t(kinds_.size()));
      choice_.push_back(int32_t(bytes.next(item_begin_[i], item_begin_[i + 1] - 1)));
    }
    p_.options = int32_t(kinds_.size()), p_.pieces = int32_t(option_of_.size());
    draw_rules();
    for (int32_t m = 0; m < p_.tiers; ++m) limit_.push_back(bytes.flip(3) ? bytes.positive() : 1e12);
    p_.hinges = bytes.flip() ? int32_t(bytes.next(1, 4)) : 0;
    for (int32_t q = 0; q < p_.pieces; ++q) home_.push_back(draw_unit(kinds_[option_of_[q]]));
    if (halves_) draw_halvings();
    draw_amounts();
    p_.item_begin = item_begin_.data(), p_.option_begin = option_begin_.data(), p_.option_unit_kind = kinds_.data();
    p_.piece_load = load_.data(), p_.piece_link = link_.data(), p_.piece_bytes = bytes_of_.data();
    p_.limit = limit_.data(), p_.item_rule = rule_.data(), p_.allowed = allowed_.data();
    p_.home = homed_ ? home_.data() : nullptr, p_.stay_bytes = homed_ ? stay_.data() : nullptr;
    p_.group_end = group_end_.data(), p_.group_power = group_power_.data();
    p_.hinge_weight = weights_.data(), p_.hinge_offset = offsets_.data(), p_.hinge_out = outs_.data();
  }

  bool run() {
    Ints unit(size_t(p_.pieces), NO_UNIT), order;
    for (const int32_t option : choice_)
      for (int32_t q = option_begin_[option]; q < option_begin_[option + 1]; ++q) order.push_back(q);
    if (!place_greedily(order, unit)) return false;
    check_cost(unit);
    anneal(choice_, unit);
    if (halves_) neuroshard();
    return true;
  }

 private:
  void add_option(int32_t item) {
    const uint8_t kind = uint8_t(bytes_.flip(3) ? bytes_.next(0, 2) : UNIT_RANK);
    for (int64_t pieces = bytes_.next(1, 4); pieces-- > 0;)
      option_of_.push_back(int32_t(kinds_.size())), item_of_.push_back(item);
    kinds_.push_back(kind);
    option_begin_.push_back(int32_t(option_of_.size()));
  }

  static Effort draw_effort(Bytes& bytes) {
    Effort effort{};
    effort.seed = uint64_t(bytes.next(0, 255)), effort.limit_s = 1e9;
    effort.moves = bytes.flip(16) ? bytes.next(0, 3000) : bytes.next(0, 255);
    effort.hot = bytes.flip() ? 0.02 : 0.5, effort.cold = bytes.flip(4) ? 0 : 1e-5;
    effort.smooth = bytes.flip() ? 0.3 : 0;
    return effort;
  }

  void draw_amounts() {
    p_.constant = bytes_.positive();
    for (int32_t h = 0; h < p_.hinges; ++h) {
      offsets_.push_back(bytes_.positive() - bytes_.positive()), outs_.push_back(bytes_.positive());
      for (int32_t k = 0; k < p_.loads; ++k) weights_.push_back(bytes_.positive());
    }
    for (int32_t q = 0; q < p_.pieces; ++q) {
      for (int32_t k = 0; k < p_.loads; ++k) load_.push_back(bytes_.positive());
      link_.push_back(bytes_.positive()), key_.push_back(bytes_.positive());
      for (int32_t m = 0; m < p_.tiers; ++m) bytes_of_.push_back(bytes_.positive());
      stay_.push_back(bytes_of_.back());
    }
  }

  void draw_halvings() {
    levels_ = int32_t(bytes_.next(1, 4));
    how_ = {int32_t(bytes_.next(1, 3)), int32_t(bytes_.next(1, 3)), int32_t(bytes_.next(0, 4)),
            int32_t(bytes_.next(1, 4)), 1.5};
    halving_.assign(size_t(p_.items) * levels_, -1);
    for (int32_t i = 0; i < p_.items; ++i) {
      const int32_t first = option_begin_[item_begin_[i]], end = option_begin_[item_begin_[i + 1]];
      for (int64_t l = 0, most = bytes_.next(1, levels_); l < most; ++l)
        halving_[size_t(i) * levels_ + size_t(l)] = int32_t(bytes_.next(first, end - 1));
    }
  }

  void draw_rules() {
    const int32_t rules = int32_t(bytes_.next(0, 2));
    for (int32_t i = 0; i < p_.items; ++i) rule_.push_back(int32_t(bytes_.next(-1, rules - 1)));
    for (int32_t at = 0; at < rules * units_; ++at) allowed_.push_back(!bytes_.flip(4));
    allowed_.push_back(1);
  }

  int32_t draw_unit(uint8_t kind) {
    if (kind == UNIT_RANK) return int32_t(bytes_.next(0, world_ - 1));
    return kind == UNIT_HOST ? int32_t(bytes_.next(world_, units_ - 2)) : units_ - 1;
  }

  bool fits_kind(int32_t piece, int32_t unit) const {
    const uint8_t kind = kinds_[option_of_[piece]];
    if (kind == UNIT_RANK) return unit >= 0 && unit < world_;
    return kind == UNIT_HOST ? unit >= world_ && unit < units_ - 1 : unit == units_ - 1;
  }
  bool is_allowed(int32_t piece, int32_t unit) const {
    const int32_t rule = rule_[item_of_[piece]];
    return rule < 0 || allowed_[size_t(rule) * units_ + unit];
  }

  // What rw_cost says, from sums of its own.
  double cost_of(const Ints& unit, double* over) const {
    double phi = p_.constant, link = 0;
    *over = 0;
    for (int32_t r = 0; r < world_; ++r) {
      Floats load(size_t(p_.loads), 0.0), bytes(size_t(p_.tiers), 0.0);
      double links = 0;
      for (int32_t q = 0; q < p_.pieces; ++q) {
        const bool here = unit[q] == r || unit[q] == units_ - 1 || (unit[q] == world_ + r / p_.devices);
        if (unit[q] == NO_UNIT || !here) continue;
        for (int32_t k = 0; k < p_.loads; ++k) load[k] += load_[size_t(q) * p_.loads + k];
        for (int32_t m = 0; m < p_.tiers; ++m) bytes[m] += bytes_of_[size_t(q) * p_.tiers + m];
        links += link_[q];
      }
      phi = std::max(phi, phi_of(load)), link = std::max(link, links);
      for (int32_t m = 0; m < p_.tiers; ++m)
        if (bytes[m] > limit_[m]) *over += (bytes[m] - limit_[m]) / std::max(limit_[m], 1.0);
    }
    return phi + link;
  }
  double phi_of(const Floats& load) const {
    double total = p_.constant;
    for (int32_t g = 0, k = 0; g < p_.groups; ++g) {
      double top = 0, sum = 0;
      for (int32_t i = k; i < group_end_[g]; ++i) top = std::max(top, load[i]);
      for (; k < group_end_[g]; ++k) sum += top ? std::pow(load[k] / top, group_power_[g]) : 0;
      total += top * std::pow(sum, 1 / group_power_[g]);
    }
    for (int32_t h = 0; h < p_.hinges; ++h) {
      double height = offsets_[h];
      for (int32_t k = 0; k < p_.loads; ++k) height += load[k] * weights_[size_t(k) * p_.hinges + h];
      total += (std::max(height, 0.0) - std::max(offsets_[h], 0.0)) * outs_[h];
    }
    return std::max(total, 0.0);
  }

  bool place_greedily(const Ints& order, Ints& unit) {
    const Floats scale(size_t(2 + p_.tiers), 1.0);
    const double* keys = measure_ == BY_KEY ? key_.data() : nullptr;
    const auto place = [&](Ints& made) {
      return rw_greedy(&p_, order.data(), int32_t(order.size()), measure_, keys, scale.data(), link_limit_,
                       made.data());
    };
    Ints again = unit;
    const int32_t done = place(unit);
    CHECK(place(again) == done && again == unit);
    CHECK(done >= 0 && done <= int32_t(order.size()));
    for (int32_t at = 0; at < int32_t(order.size()); ++at) {
      const int32_t q = order[at];
      CHECK(at < done ? fits_kind(q, unit[q]) && is_allowed(q, unit[q]) : unit[q] == NO_UNIT);
    }
    return done == int32_t(order.size());
  }

  double check_cost(const Ints& unit) {
    double over = -1, wanted_over;
    const double cost = rw_cost(&p_, unit.data(), &over), wanted = cost_of(unit, &wanted_over);
    CHECK(near(cost, wanted, CLOSE) && near(over, wanted_over, CLOSE));
    return cost;
  }

  void anneal(const Ints& start_choice, const Ints& start_unit) {
    Ints choice = start_choice, unit = start_unit, choice_again = choice, unit_again = unit;
    const Found found = rw_anneal(&p_, &effort_, choice.data(), unit.data());
    const Found again = rw_anneal(&p_, &effort_, choice_again.data(), unit_again.data());
    CHECK(found.cost == again.cost && found.over == again.over && choice == choice_again && unit == unit_again);
    CHECK(found.moves == effort_.moves && !found.stopped);
    for (int32_t i = 0; i < p_.items; ++i) {
      CHECK(choice[i] >= item_begin_[i] && choice[i] < item_begin_[i + 1]);
      for (int32_t q = option_begin_[item_begin_[i]]; q < option_begin_[item_begin_[i + 1]]; ++q)
        CHECK(option_of_[q] == choice[i] ? fits_kind(q, unit[q]) && is_allowed(q, unit[q]) : unit[q] == NO_UNIT);
    }
    double over, start_over;
    const double cost = cost_of(unit, &over), start = cost_of(start_unit, &start_over);
    CHECK(std::fabs(found.cost - cost) <= CLOSE * (cost + 1e-3 * start));  // sums that come to nothing keep roundings
    CHECK(std::fabs(found.over - over) <= CLOSE * std::max(over, 1.0));
    if (over > CLOSE * std::max(start_over, 1.0))
      CHECK(over <= start_over * (1 + CLOSE));
    else if (start_over == 0)
      CHECK(cost - effort_.bytes_price * stays(unit) <=
            start - effort_.bytes_price * stays(start_unit) + CLOSE * (start + cost + 1));
  }
  double stays(const Ints& unit) const {
    double bytes = 0;
    for (int32_t q = 0; q < p_.pieces; ++q) bytes += homed_ && unit[q] == home_[q] ? stay_[q] : 0;
    return bytes;
  }

  void neuroshard() {
    const size_t room = size_t(p_.items + how_.depth + 1);
    Ints piece(room, -2), rank(room, -2), piece_again(room, -2), rank_again(room, -2);
    int32_t count = 0, count_again = 0;
    const double cost = rw_neuroshard(&p_, &how_, halving_.data(), levels_, piece.data(), rank.data(), &count);
    const double again =
        rw_neuroshard(&p_, &how_, halving_.data(), levels_, piece_again.data(), rank_again.data(), &count_again);
    CHECK(cost == again && count == count_again && piece == piece_again && rank == rank_again);
    CHECK(count >= p_.items && count <= p_.items + how_.depth);
    if (cost >= 1e300) return;
    Floats sums(size_t(world_) * p_.loads, 0.0), links(size_t(world_), 0.0), bytes(size_t(world_) * p_.tiers, 0.0);
    for (int32_t s = 0; s < count; ++s) {
      const int32_t q = piece[s], r = rank[s];
      CHECK(r >= 0 && r < world_ && is_allowed(q, r));
      for (int32_t k = 0; k < p_.loads; ++k) sums[size_t(r) * p_.loads + k] += load_[size_t(q) * p_.loads + k];
      links[r] += link_[q];
      for (int32_t m = 0; m < p_.tiers; ++m) bytes[size_t(r) * p_.tiers + m] += bytes_of_[size_t(q) * p_.tiers + m];
    }
    double phi = p_.constant;
    for (int32_t r = 0; r < world_; ++r) {
      phi = std::max(phi, phi_of(Floats(sums.begin() + r * p_.loads, sums.begin() + (r + 1) * p_.loads)));
      for (int32_t m = 0; m < p_.tiers; ++m) CHECK(bytes[size_t(r) * p_.tiers + m] <= limit_[m] * (1 + CLOSE));
    }
    CHECK(near(cost, phi + *std::max_element(links.begin(), links.end()), CLOSE));
  }

  Bytes& bytes_;
  Effort effort_;
  Problem p_{};
  Neuroshard how_{};
  int32_t world_, units_, measure_, levels_ = 0;
  double link_limit_;
  bool homed_, halves_;
  Ints item_begin_, option_begin_, option_of_, item_of_, rule_, home_, group_end_, choice_, halving_;
  std::vector<uint8_t> kinds_, allowed_;
  Floats load_, link_, bytes_of_, limit_, stay_, key_, group_power_, weights_, offsets_, outs_;
};

class Ordering {
 public:
  explicit Ordering(Bytes& bytes) : bytes_(bytes) {
    effort_.seed = uint64_t(bytes.next(0, 255)), effort_.limit_s = 1e9, effort_.hot = 0.05, effort_.cold = 1e-5;
    effort_.moves = bytes.flip(16) ? bytes.next(1, 3000) : bytes.next(1, 255);
    links_.collective = int32_t(bytes.next(0, 2));
    links_.hosts = links_.collective == 1 ? 1 << bytes.next(1, 4) : int32_t(bytes.next(2, 12));
    links_.groups = int32_t(bytes.next(1, std::min(links_.hosts, 4)));
    links_.keep_first = bytes.flip();
    for (int32_t h = 0; h < links_.hosts; ++h) start_.push_back(h);
    if (bytes.flip())
      for (size_t at = 1; at < start_.size(); ++at)  // host 0 stays first
        std::swap(start_[at], start_[size_t(bytes.next(1, links_.hosts - 1))]);
    for (int32_t h = 0; h < links_.hosts; ++h)  // each group has a host
      group_.push_back(h < links_.groups ? h : int32_t(bytes.next(0, links_.groups - 1)));
    links_.size_bytes = 1 + bytes.positive();
    for (int32_t g = 0; g < links_.groups; ++g) uplink_.push_back(1 + bytes.positive());
    for (int32_t at = 0; at < links_.hosts * links_.hosts; ++at)
      latency_.push_back(bytes.positive() * 1e-6), rate_.push_back(1 + bytes.positive());
    links_.latency = latency_.data(), links_.rate = rate_.data();
    links_.group = group_.data(), links_.uplink = uplink_.data();
  }

  void run() {
    const double given = seconds(start_);
    Ints annealed = start_, again = start_;
    const double best = rw_order_anneal(&links_, &effort_, annealed.data());
    CHECK(best == rw_order_anneal(&links_, &effort_, again.data()) && annealed == again);
    check(start_, annealed, given, best);
    if (links_.hosts > (bytes_.flip(64) ? 8 : 6)) return;  // 8 take long: every order is tried
    Ints exact = start_;
    const double least = rw_order_exact(&links_, exact.data());
    check(start_, exact, given, least);
    CHECK(least <= best * (1 + 1e-8));
  }

 private:
  double seconds(const Ints& order) const {
    const double found = rw_order_seconds(&links_, order.data());
    CHECK(found >= 0 && std::isfinite(found));
    return found;
  }
  bool torn(const Ints& order) const {
    if (!links_.keep_first) return false;
    int32_t runs = 1;
    for (size_t k = 1; k < order.size(); ++k) runs += group_[order[k]] != group_[order[k - 1]];
    return runs != links_.groups;
  }
  // A result is an order, the given one or a better one.
  void check(const Ints& start, const Ints& order, double given, double best) const {
    Ints sorted = order;
    std::sort(sorted.begin(), sorted.end());
    for (int32_t h = 0; h < links_.hosts; ++h) CHECK(sorted[h] == h);
    if (links_.keep_first) CHECK(order[0] == 0);
    if (order == start) return;
    CHECK(!torn(order) && near(seconds(order), best));
    if (!torn(start)) CHECK(best < given);
  }

  Bytes& bytes_;
  Effort effort_{};
  Links links_{};
  Ints start_, group_;
  Floats latency_, rate_, uplink_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  Bytes bytes(data, size);
  ++rate().inputs;
  if (bytes.flip(3)) {
    Ordering(bytes).run();
    ++rate().taken;
  } else {
    rate().taken += Placing(bytes).run();
  }
  return 0;
}
