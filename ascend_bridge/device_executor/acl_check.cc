// Compiled, never linked: every declaration of acl_functions.h against the real acl/acl.h.
// Nothing of the vendor's header is kept here; check_acl.py fetches it and throws it away.
#include <type_traits>

#include "acl/acl.h"
#include "acl_functions.h"

namespace {

// What a type is in the ABI: an enumeration is an int, and so is `aclError`.
template <class T, bool is_enum = std::is_enum_v<T>>
struct Plain {
  using type = T;
};
template <class T>
struct Plain<T, true> {
  static_assert(sizeof(T) == sizeof(int), "an enumeration that is no int");
  using type = int;
};
template <class R, class... Args>
struct Plain<R(Args...), false> {
  using type = typename Plain<R>::type(typename Plain<Args>::type...);
};

template <class Ours, class Theirs>
constexpr bool same = std::is_same_v<Ours, typename Plain<Theirs>::type>;

#define CHECK_FUNCTION(result, name, arguments) \
  static_assert(same<result arguments, decltype(::name)>, #name " differs from acl.h");
PAGEDJAX_ACL_FUNCTIONS(CHECK_FUNCTION)

#define CHECK_CONSTANT(ours, value, theirs) \
  static_assert(int(theirs) == pagedjax::acl::ours, #theirs " differs from acl.h");
PAGEDJAX_ACL_CONSTANTS(CHECK_CONSTANT)

static_assert(sizeof(aclrtContext) == sizeof(void*) && std::is_pointer_v<aclrtStream>);

#ifdef PAGEDJAX_ACL_WRONG
// Must not compile: the size is not an int.
static_assert(same<int(void**, int, int), decltype(::aclrtMalloc)>,
              "a wrong signature is found");
#endif

}  // namespace
